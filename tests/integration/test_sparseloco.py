"""SparseLoCo's outer step and shares, through a real aggregator, against the same in one process."""

from __future__ import annotations

import copy
import functools
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import gradwire
from fleet import SEED, Points, in_threads, mlp, run_config, squared_error, train, weights
from gradwire.errors import ConfigError, ManifestMismatch
from gradwire.samples import SampleOrder
from support import aggregator

EVERYTHING = gradwire.TopK(k=16, chunk=16, layout="flat", values="fp32", dense_below=0, normalization="senders")
BATCH = 8

Ranges = tuple[tuple[int, int], ...]


def sparseloco(scheme: Any = EVERYTHING, **options: Any) -> Any:
    return lambda model, session: gradwire.SparseLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1), session, model=model, scheme=scheme, **options
    )


def batches_of(ranges: Ranges) -> list[Any]:
    order, data = SampleOrder(SEED, len(Points())), Points()
    indices = [int(i) for start, stop in ranges for i in order.indices(start, stop)]
    return [default_collate([data[i] for i in indices[s : s + BATCH]]) for s in range(0, len(indices), BATCH)]


def pseudo_gradient(model: nn.Module, ranges: Ranges, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """What SGD, in local steps over the samples, takes from a copy of the model's weights."""
    local = copy.deepcopy(model)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for batch in batches_of(ranges):
        optimizer.zero_grad()
        (scale * squared_error(local, batch)).backward()
        optimizer.step()
    after = dict(local.named_parameters())
    return {name: (p - after[name]).detach().double() for name, p in model.named_parameters()}


def assert_near(found: dict[str, torch.Tensor], model: nn.Module, tolerance: float = 1e-6) -> None:
    for name, tensor in weights(model).items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


def test_one_uncompressed_inner_step_is_plain_averaging() -> None:
    with aggregator(run_config(rounds=12, global_batch=16, inner_batch=8, min_workers=2)) as serving:
        one, two = in_threads(
            lambda: train(serving.address, "a", sparseloco()), lambda: train(serving.address, "b", sparseloco())
        )
    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(12):
        optimizer.zero_grad()
        for batch in batches_of(((16 * number, 16 * number + 16),)):
            (squared_error(alone, batch) / 2).backward()
        optimizer.step()
    assert_near(weights(one), alone)
    assert all(torch.equal(tensor, weights(two)[name]) for name, tensor in weights(one).items())


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_the_outer_momentum_is_torchs_nesterov(momentum: float) -> None:
    make = sparseloco(outer_lr=0.7, outer_momentum=momentum)
    with aggregator(run_config(rounds=10, global_batch=32)) as serving:
        found = weights(train(serving.address, "a", make))
    outer = mlp()
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=momentum, nesterov=True)
    for number in range(10):
        for name, update in pseudo_gradient(outer, ((32 * number, 32 * number + 32),)).items():
            outer.get_parameter(name).grad = update.float()
        optimizer.step()
    assert_near(found, outer, 1e-5)


def test_workers_with_other_momenta_are_told_apart_at_join() -> None:
    with (
        aggregator(run_config(rounds=1, global_batch=8)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as first,
        gradwire.connect(serving.address, worker="b", give_up_after_s=20) as second,
    ):
        sparseloco(outer_momentum=0.9)(mlp(), first)
        with pytest.raises(ManifestMismatch, match=r"sparseloco:0\.5 here, sparseloco:0\.9 in the run"):
            sparseloco(outer_momentum=0.5)(mlp(), second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outer_momentum": 1.0}, r"outer_momentum = 1\.0: allowed is 0 to below 1"),
        ({"residual_decay": -0.1}, r"decay = -0\.1: allowed is 0 to 1"),
        ({"scheme": gradwire.TopK(transform="dct")}, "transform = 'dct'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with (
        aggregator(run_config(rounds=1, global_batch=8)) as serving,
        gradwire.connect(serving.address, worker="a", give_up_after_s=20) as session,
        pytest.raises(ConfigError, match=words),
    ):
        sparseloco(**options)(mlp(), session)


def test_a_worker_with_huge_updates_is_clipped_to_the_median_norm() -> None:
    scheme = gradwire.TopK(k=16, chunk=16, layout="flat", values="fp32", dense_below=0, clip="median")
    shares: dict[str, Ranges] = {}

    def job(name: str, scale: float, address: str) -> nn.Module:
        def note(session: gradwire.Session, model: nn.Module) -> None:
            assert session.share is not None
            shares[name] = session.share.ranges

        return train(
            address,
            name,
            sparseloco(scheme),
            on_batch=note,
            loss_of=lambda model, batch: scale * squared_error(model, batch),
        )

    scales = {"a": 1.0, "b": 1.5, "wild": 40.0}
    with aggregator(run_config(rounds=1, global_batch=48, inner_batch=8, min_workers=3)) as serving:
        found, *_ = in_threads(
            *(functools.partial(job, name, scale, serving.address) for name, scale in scales.items())
        )
    model = mlp()
    updates = [pseudo_gradient(model, shares[name], scale=scale) for name, scale in scales.items()]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norms = [float(update[name].norm()) for update in updates]
            median = sorted(norms)[1]
            assert norms[2] == max(norms) > 5 * median
            clipped = [update[name] * min(1.0, median / norm) for update, norm in zip(updates, norms, strict=True)]
            parameter.sub_((sum(clipped) / 3).float())
    assert_near(weights(found), model, 1e-5)


def test_a_slow_machine_takes_fewer_inner_steps_and_counts_for_as_much_less() -> None:
    """The clock of each worker is set so that it seems to train 32, or 8, samples a second."""
    speeds = {"fast": 32.0, "slow": 8.0}
    shares: dict[int, dict[str, Ranges]] = defaultdict(dict)

    def job(name: str, address: str) -> nn.Module:
        def note(session: gradwire.Session, model: nn.Module) -> None:
            share = session.share
            assert share is not None
            shares[session.round][name] = share.ranges
            session._share_started = time.monotonic() - share.samples / speeds[name]

        return train(address, name, sparseloco(), on_batch=note)

    config = run_config(rounds=8, global_batch=80, inner_batch=BATCH, min_workers=2)
    config = config.model_copy(update={"batch": config.batch.model_copy(update={"shares": "throughput"})})
    with aggregator(config) as serving:
        fast, slow = in_threads(*(functools.partial(job, name, serving.address) for name in speeds))
    samples = [{name: sum(b - a for a, b in ranges) for name, ranges in shares[n].items()} for n in range(8)]
    assert samples[0] == {"fast": 40, "slow": 40}
    assert samples[-1] == {"fast": 64, "slow": 16}
    model = mlp()
    for number in range(8):
        updates = {name: pseudo_gradient(model, ranges) for name, ranges in shares[number].items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(sum(updates[w][name] * samples[number][w] / 80 for w in speeds).float())
    assert_near(weights(fast), model, 1e-5)
    assert all(torch.equal(tensor, weights(slow)[name]) for name, tensor in weights(fast).items())


def test_one_bit_values_train_and_leave_all_workers_alike() -> None:
    scheme = gradwire.TopK(k=8, chunk=64, values="sign", dense_below=16, normalization="senders")

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float(squared_error(model, default_collate(list(Points()))))

    with aggregator(run_config(rounds=40, global_batch=64, inner_batch=8, min_workers=2)) as serving:
        one, two = in_threads(
            lambda: train(serving.address, "a", sparseloco(scheme)),
            lambda: train(serving.address, "b", sparseloco(scheme)),
        )
        sparse = next(e for e in serving.run.manifest or () if e.name == "0.weight")
    assert sparse.scheme == scheme
    assert all(torch.equal(tensor, weights(two)[name]) for name, tensor in weights(one).items())
    assert loss(one) < 0.3 * loss(mlp())
