"""Any torch optimizer, stepping on the average of all workers' gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradwire.codec import Dense, Scheme, TopK, decode
from gradwire.errors import ManifestMismatch, NonFiniteGradient
from gradwire.exchange import Aggregate, Contribution
from gradwire.manifest import Manifest, Role
from gradwire.optim.accumulate import GradientMean, set_gradients
from gradwire.optim.loss import LossMean
from gradwire.optim.residual import Residual
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

    Raises ManifestMismatch if the run's tensors, method or data are not these, ConfigError where names are missing.
    """

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
        self.optimizer = optimizer
        self._session = session
        self._tensors = tensors_of(optimizer, model)
        scheme = scheme if scheme is not None else Dense()
        self._manifest = self._tensors.manifest(f"gradients:{type(optimizer).__name__}", scheme)
        self._clip_norm = clip_norm
        self.residual = Residual(residual_decay if isinstance(scheme, TopK) else 0.0)
        self._mean = GradientMean(self._tensors.trained)
        self._loss = LossMean()
        self._buffers = {name: buffer.clone() for name, buffer in self._tensors.averaged.items()}
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
        batch = self._session.take_batch()
        self._mean.add(batch.samples / batch.share_samples)
        self._loss.add(loss, batch.samples)
        if batch.last:
            self._exchange()

    def _exchange(self) -> None:
        updates: dict[str, torch.Tensor | None] = {**self._mean.take(), **self._tensors.averaged}
        loss = self._loss.take()
        try:
            with self._session.phase("encode"):
                encoded = self.residual.compress(self._manifest, updates)
        except NonFiniteGradient as error:
            self._session.abstain(str(error))
            return
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._session.exchange(Contribution(encoded, loss, rates))

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
        if not aggregate.void:
            gradients: dict[str, torch.Tensor] = {}
            for entry, encoded in zip(self._manifest, aggregate.tensors, strict=True):
                if encoded is not None:
                    kind = gradients if entry.role is Role.PARAMETER else self._buffers
                    kind[entry.name] = decode(encoded, entry.scheme, entry.shape)
            set_gradients(self._tensors.trained, gradients)
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(self._tensors.trained.values(), self._clip_norm)
            for group, rate in zip(self.optimizer.param_groups, aggregate.learning_rates, strict=False):
                group["lr"] = rate
            self.optimizer.step()
        # In a void round the statistics go back with the weights.
        for name, buffer in self._tensors.averaged.items():
            buffer.copy_(self._buffers[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, buffers, and the wrapped optimizer's state."""
        state = self._tensors.snapshot()
        for name, parameter in self._tensors.trained.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return state

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over another replica's state."""
        self._tensors.restore(state)
        self._buffers = {name: buffer.clone() for name, buffer in self._tensors.averaged.items()}
        self.residual.reset()
        self._load_optimizer_state(state)

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
