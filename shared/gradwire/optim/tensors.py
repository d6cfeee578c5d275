"""The tensors of a model under the names they have on every worker."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradwire.codec import Dense, Scheme
from gradwire.errors import ConfigError, ManifestMismatch
from gradwire.manifest import Entry, Manifest, Role
from gradwire.state import restore

_WRAPPERS = ("module.", "_orig_mod.")
# Settings of an optimizer that depend on its worker's device.
_OF_THE_DEVICE = frozenset({"capturable", "differentiable", "foreach", "fused"})


@dataclass(frozen=True)
class ModelTensors:
    """Everything of a model that concerns a run, by name, in the model's order.

    trained: parameters that are exchanged: in the optimizer, requiring a gradient, tied ones once.
    frozen: the other parameters; they travel in snapshots alone.
    averaged: floating-point buffers, exchanged dense.
    kept: the other buffers: integers, and what is not finite from the start, such as a mask of -inf. They travel in
        snapshots alone.
    """

    trained: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    averaged: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor]

    @property
    def device(self) -> torch.device:
        return next(iter(self.trained.values())).device

    def manifest(self, method: str, scheme: Scheme) -> Manifest:
        """What is exchanged: the parameters under `scheme`, the buffers dense in float32."""
        parameters = (Entry(n, tuple(p.shape), scheme, Role.PARAMETER) for n, p in self.trained.items())
        buffers = (Entry(n, tuple(b.shape), Dense("fp32"), Role.BUFFER) for n, b in self.averaged.items())
        return Manifest(method, (*parameters, *buffers))

    def groups(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's group of every trained parameter.

        Raises ConfigError if it holds a parameter with a gradient that is not exchanged, since it was added, or
        unfrozen, after the manifest was made: each worker would train it for itself.
        """
        names = {id(parameter): name for name, parameter in self.trained.items()}
        groups: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is not None:
                    groups[name] = group
                elif parameter.requires_grad:
                    raise ConfigError(
                        f"group {number} of the optimizer has a parameter of shape {list(parameter.shape)} that is "
                        "not exchanged: it was added, or unfrozen, after gradwire took the optimizer. What is trained "
                        "can't change during a run; start another run with the new parameters"
                    )
        return groups

    def layout(self, optimizer: torch.optim.Optimizer) -> str:
        """A word for how the trained parameters fall into groups; empty for one group."""
        if len(optimizer.param_groups) == 1:
            return ""
        names = {id(parameter): name for name, parameter in self.trained.items()}
        members = [sorted(names.get(id(p), "") for p in group["params"]) for group in optimizer.param_groups]
        return f" groups={hashlib.sha256(json.dumps(members).encode()).hexdigest()[:8]}"

    def snapshot(self) -> dict[str, torch.Tensor]:
        """All of them, for a snapshot or a checkpoint."""
        return {f"{kind}/{name}": tensor.detach() for kind, name, tensor in self._all()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over a snapshot. Raises ManifestMismatch where it doesn't fit."""
        for kind, name, tensor in self._all():
            restore(tensor, state, f"{kind}/{name}")

    def _all(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, parameter in (*self.trained.items(), *self.frozen.items()):
            yield "weight", name, parameter
        for name, buffer in (*self.averaged.items(), *self.kept.items()):
            yield "buffer", name, buffer


def tensors_of(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> ModelTensors:
    """The tensors of `model` that `optimizer` trains.

    Without a model the names have to come from the optimizer: torch.optim.SGD(model.named_parameters(), ...).
    Raises ConfigError where names are missing, or nothing is trained.
    """
    named = list(model.named_parameters()) if model is not None else _names_from(optimizer)
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained, frozen = {}, {}
    for name, parameter in named:
        if id(parameter) in optimized and parameter.requires_grad:
            trained[strip(name)] = parameter
        else:
            frozen[strip(name)] = parameter
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise ConfigError(f"{name} is {parameter.dtype}: only float parameters can be trained with others")
    if not trained:
        raise ConfigError("the optimizer trains no parameter of the model: nothing would be exchanged")
    stray = optimized - {id(parameter) for _, parameter in named}
    if stray:
        raise ConfigError(f"the optimizer holds {len(stray)} parameters that are not in the model given as model=")
    averaged: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}
    for name, buffer in _persistent_buffers(model):
        statistic = buffer.is_floating_point() and bool(torch.isfinite(buffer.contiguous()).all())
        (averaged if statistic else kept)[strip(name)] = buffer
    if len(trained) + len(frozen) < len(named):
        raise ConfigError("two parameters have the same name once module. and _orig_mod. are taken off; rename one")
    return ModelTensors(trained, frozen, averaged, kept)


def strip(name: str) -> str:
    """The name without what DataParallel, DDP and torch.compile put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _names_from(optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    pairs: list[tuple[str, nn.Parameter]] = []
    for group in optimizer.param_groups:
        names: Iterable[str] | None = group.get("param_names")
        if names is None:
            raise ConfigError(
                "the tensors need names that are the same on every worker: pass model=, or make the optimizer from "
                "model.named_parameters()"
            )
        pairs.extend(zip(names, group["params"], strict=True))
    return pairs


def _persistent_buffers(model: nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    if model is None:
        return
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def group_numbers(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The numbers in an optimizer's groups, such as learning rates, for a snapshot: JSON in UTF-8, uint8."""
    numbers = [dict(_numbers(group)) for group in optimizer.param_groups]
    return {"groups": torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8)}


def load_group_numbers(optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor]) -> None:
    """Takes over the numbers in a snapshot, in their own types. Raises ManifestMismatch where there are none."""
    if "groups" not in state:
        raise ManifestMismatch("the snapshot says nothing of the optimizer's parameter groups")
    for group, saved in zip(optimizer.param_groups, json.loads(bytes(state["groups"].tolist())), strict=True):
        group.update({key: type(value)(saved[key]) for key, value in _numbers(group) if key in saved})


def _numbers(group: Mapping[str, Any]) -> list[tuple[str, int | float]]:
    return [(k, v) for k, v in group.items() if isinstance(v, int | float) and k not in _OF_THE_DEVICE]


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer, such as LBFGS, that evaluates the model itself within a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the model again within a step, where gradients are no mean of all "
            "workers: use an optimizer whose step() needs no closure"
        )
