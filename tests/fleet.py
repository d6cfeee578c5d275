"""Workers that train for real, as threads of the test process; support.py has the aggregator for them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradwire
from gradwire import state
from gradwire.config import RunConfig, parse_config

SEED = 7


def run_config(
    *, rounds: int, global_batch: int, inner_batch: int = 1, training: Any = None, **timing: Any
) -> RunConfig:
    """A run on free ports of loopback; `timing` are keys of [round]."""
    values: dict[str, Any] = {
        "name": "test",
        "seed": SEED,
        "rounds": rounds,
        "batch": {"global_batch": global_batch, "inner_batch": inner_batch, "shares": "fixed"},
        "round": {"min_workers": 1, "gather_s": 30.0, **timing},
        "server": {"listen": "127.0.0.1:0", "http": ""},
    }
    if training is not None:
        values["training"] = training
    return parse_config(values, source="test")


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions side by side; their results in order. The first error is raised, without waiting for the rest."""
    pool = concurrent.futures.ThreadPoolExecutor(len(functions))
    futures = [pool.submit(function) for function in functions]
    done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
    pool.shutdown(wait=False, cancel_futures=True)
    for future in done:
        future.result()
    return [future.result() for future in futures]


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A fixed regression problem: 8 inputs, 3 targets."""

    def __init__(self, length: int = 96) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 8, generator=generator)
        self.targets = torch.tanh(self.inputs @ torch.randn(8, 3, generator=generator))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def mlp(seed: int = 0, *, norm: bool = False) -> nn.Sequential:
    """A small network, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(32))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * 0.3)
                layer.bias.zero_()
    return model


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


MakeOptimizer = Callable[[nn.Module, gradwire.Session], Any]
OnBatch = Callable[[gradwire.Session, nn.Module], None]


def train(
    address: str,
    worker: str,
    make_optimizer: MakeOptimizer,
    *,
    model: nn.Module | None = None,
    batch_size: int = 8,
    on_batch: OnBatch | None = None,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = squared_error,
) -> nn.Module:
    """A plain training loop on Points, distributed; returns the model at the end of the run."""
    model = model if model is not None else mlp()
    with gradwire.connect(address, worker=worker, give_up_after_s=20) as session:
        optimizer = make_optimizer(model, session)
        for batch in session.loader(Points(), batch_size=batch_size):
            if on_batch is not None:
                on_batch(session, model)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step(loss)
    return model


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def digest(model: nn.Module) -> str:
    return state.digest(model.state_dict())
