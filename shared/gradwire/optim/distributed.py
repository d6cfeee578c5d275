"""Any torch optimizer, stepping on the average of all workers' gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from gradwire.codec import Dense, Scheme, TopK, decode
from gradwire.errors import ConfigError, ManifestMismatch
from gradwire.exchange import Aggregate
from gradwire.manifest import Manifest, Role
from gradwire.optim.accumulate import set_gradients
from gradwire.optim.buffers import Buffers
from gradwire.optim.residual import Residual
from gradwire.optim.share import Exchange, ShareMean, set_learning_rates
from gradwire.optim.tensors import tensors_of
from gradwire.session import Session


class DistributedOptimizer:
    """Wraps a torch optimizer so that one step takes a whole round.

    `step` adds each batch's gradient to the share's mean, and after the share's last batch sends it, waits for the mean
    over all workers, puts that in place of the gradients and lets the wrapped optimizer step. Its state is
    therefore the same on every worker. With `TopK` the gradient is compressed with error feedback (which harms
    Adam; plain SGD with momentum is what it suits).

    Args:
        optimizer: the one to wrap; its parameters are the ones trained.
        session: from gradwire.connect. Joining, and loading the run's state, happens here.
        model: where names and buffers come from; needed unless the optimizer was made from named parameters.
        scheme: how gradients are encoded; Dense("fp32") is exact.
        clip_norm: the averaged gradient's L2 norm is clipped to this; None: not at all.
        residual_decay: error feedback with TopK; 0 turns it off.

    Raises ManifestMismatch if the run's tensors, method or data are not these, ConfigError where names are missing or
    the optimizer steps with a closure.
    """

    _step_supports_amp_scaling = True  # what torch.amp.GradScaler asks for

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        session: Session,
        *,
        model: nn.Module | None = None,
        scheme: Scheme | None = None,
        clip_norm: float | None = None,
        residual_decay: float = 1.0,
    ) -> None:
        require_no_closure(optimizer)
        self.optimizer = optimizer
        self._session = session
        self._tensors = tensors_of(optimizer, model)
        scheme = scheme if scheme is not None else Dense()
        self._manifest = self._tensors.manifest(f"gradients:{type(optimizer).__name__}", scheme)
        self._clip_norm = clip_norm
        self.residual = Residual(residual_decay if isinstance(scheme, TopK) else 0.0)
        self._share = ShareMean(session, self._tensors.trained)
        self._exchange = Exchange(session, self._tensors, self._manifest, self.residual)
        self._buffers = Buffers(self._tensors.averaged)
        session.join(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's, so that learning rates can be set as usual."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """Takes the gradients of one batch of `session.loader`; after the share's last one, runs the round's exchange.

        loss: the batch's mean loss, for the run's records. Raises GradwireError outside the loader.
        """
        trained = self._share.add(self, loss)
        if trained is None:
            return
        self._tensors.groups(self.optimizer)
        gradients, mean_loss = trained
        self._exchange.hand_in(gradients, mean_loss, [float(group["lr"]) for group in self.param_groups])

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which a plain one can load, with the residual under "gradwire"."""
        return {**self.optimizer.state_dict(), "gradwire": self.residual.state_dict(self._session.round)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what is this worker's own: the residual, if it is of the round that the worker is at.

        The rest is the run's, and came with it. To start a run from a checkpoint, load it into the model and the torch
        optimizer before wrapping that.
        """
        self.residual.load_state_dict(state_dict.get("gradwire"), self._session.round)

    # What the session asks of a replica.

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def device(self) -> torch.device:
        return self._tensors.device

    def apply(self, aggregate: Aggregate) -> None:
        """Steps the wrapped optimizer on a round's mean gradient, with the learning rates of that round."""
        self.residual.settle(counted=aggregate.counted)
        buffers: dict[str, torch.Tensor] = {}
        if not aggregate.void:
            gradients: dict[str, torch.Tensor] = {}
            for entry, encoded in zip(self._manifest, aggregate.tensors, strict=True):
                if encoded is not None:
                    kind = gradients if entry.role is Role.PARAMETER else buffers
                    kind[entry.name] = decode(encoded, entry.scheme, entry.shape, device=self.device)
            set_gradients(self._tensors.trained, gradients)
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(self._tensors.trained.values(), self._clip_norm)
            set_learning_rates(self.param_groups, aggregate.learning_rates)
            if isinstance(self.optimizer, torch.optim.SparseAdam):  # it takes no others
                _make_gradients_sparse(self._tensors.trained.values())
            self.optimizer.step()
        self._buffers.apply(buffers)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Weights, buffers, and the wrapped optimizer's state, with the numbers that it keeps in its groups."""
        state = self._tensors.snapshot()
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, int | float):
                    state[f"group/{number}/{key}"] = torch.from_numpy(np.array(value))
        for name, parameter in self._tensors.trained.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return state

    def load_snapshot(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over another replica's state."""
        self._tensors.restore(state)
        self._buffers.keep()
        self.residual.reset()
        self._load_optimizer_state(state)
        for number, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                saved = state.get(f"group/{number}/{key}")
                if saved is not None and isinstance(value, int | float):
                    group[key] = type(value)(saved.item())

    def _load_optimizer_state(self, state: dict[str, torch.Tensor]) -> None:
        # Through load_state_dict, which knows where each optimizer keeps its scalars and in which dtype.
        numbers = {id(p): n for n, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"])}
        loaded: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if kind != "optimizer":
                continue
            name, _, slot = rest.rpartition("/")
            if name not in self._tensors.trained:
                raise ManifestMismatch(f"the snapshot has optimizer state for {name}, which this worker doesn't train")
            loaded.setdefault(numbers[id(self._tensors.trained[name])], {})[slot] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": loaded})


def _make_gradients_sparse(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_sparse(1)


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer, such as LBFGS, that evaluates the model itself within a step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates the model again within a step, where gradients are no mean of all "
            "workers: use an optimizer whose step() needs no closure"
        )
