"""One run on several kinds of device: every worker has the same weights, to the bit, at every round's end.

The stand-ins compute as the CPU does. So that their last bits differ as another device's would, they train in products
of their own rounding: every gradient is off by some ulps.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from devices import KINDS, Kind
from fleet import in_threads, run_config
from gradwire import state
from gradwire_worker.models import Transformer
from support import aggregator

ROUNDS = 50
CONTEXT = 16


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences that count up in steps of their own, so that there is something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(CONTEXT + 1) * (1 + index % 5) % 256


def model(device: torch.device) -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Transformer(dim=64, layers=1, heads=2, context=CONTEXT).to(device)


def demo(network: nn.Module, session: gradwire.Session) -> Any:
    return gradwire.DeMo(network.parameters(), 1e-3, session, model=network, weight_decay=0.1)


def sparseloco(network: nn.Module, session: gradwire.Session) -> Any:
    adamw = torch.optim.AdamW(network.parameters(), lr=3e-3)
    return gradwire.SparseLoCo(adamw, session, model=network, outer_momentum=0.5, outer_lr=0.7, clip_norm=1.0)


def one_bit(network: nn.Module, session: gradwire.Session) -> Any:
    sgd = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    scheme = gradwire.TopK(values="sign", normalization="senders")
    return gradwire.SparseLoCo(sgd, session, model=network, scheme=scheme)


def train(address: str, worker: str, kind: Kind, make: Any, digests: dict[int, dict[str, str]]) -> None:
    """A training loop on a kind of device, within its stand-in from the first line to the last."""
    with kind.running(), gradwire.connect(address, worker=worker, give_up_after_s=20) as session:
        network = model(kind.device)
        optimizer = make(network, session)
        for batch in session.loader(Tokens(), batch_size=4):
            if session.batch.index == 0:
                digests[session.round][worker] = state.digest(network.state_dict())
            optimizer.zero_grad()
            loss = network.loss(batch.to(kind.device))
            loss.backward()
            if kind.name.startswith("mps-stand-in"):
                for parameter in network.parameters():
                    parameter.grad.mul_(1 + 2**-20)
            optimizer.step(loss)
        digests[session.round][worker] = state.digest(network.state_dict())


def runs() -> list[Any]:
    """A CPU with both stand-ins; and with whatever hardware there is."""
    cpu, plain, strict, *hardware = KINDS
    together = [each.values[0] for each in (cpu, plain, strict)]
    return [
        pytest.param(together, id="cpu and stand-ins"),
        *(pytest.param([*together, *each.values], id=f"with {each.id}", marks=each.marks) for each in hardware),
    ]


@pytest.mark.parametrize("kinds", runs())
@pytest.mark.parametrize("make", [demo, sparseloco, one_bit], ids=lambda make: make.__name__)
def test_all_workers_have_the_same_weights_after_every_round(make: Any, kinds: list[Kind]) -> None:
    digests: dict[int, dict[str, str]] = defaultdict(dict)
    count = len(kinds)
    config = run_config(rounds=ROUNDS, global_batch=8 * count, inner_batch=4, min_workers=count)
    with aggregator(config) as serving:
        in_threads(*(functools.partial(train, serving.address, kind.name, kind, make, digests) for kind in kinds))
    assert sorted(digests) == list(range(ROUNDS + 1))
    for number, each in digests.items():
        assert len(each) == count, number
        assert len(set(each.values())) == 1, (number, each)
    assert len({next(iter(each.values())) for each in digests.values()}) == ROUNDS + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["dense", "top-k"])
def test_gradient_averaging_trains_on_every_kind(method: str, kind: Kind) -> None:
    def make(network: nn.Module, session: gradwire.Session) -> Any:
        sgd = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9)
        scheme = gradwire.Dense() if method == "dense" else gradwire.TopK(k=512)
        return gradwire.DistributedOptimizer(sgd, session, model=network, scheme=scheme, clip_norm=1.0)

    digests: dict[int, dict[str, str]] = defaultdict(dict)
    with aggregator(run_config(rounds=20, global_batch=8, inner_batch=4)) as serving:
        train(serving.address, "a", kind, make, digests)
        losses = [each.loss for each in serving.run.record.rounds]
    assert losses[-1] < 0.8 * losses[0]
