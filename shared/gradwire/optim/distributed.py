"""Any torch optimizer, stepping on the average of all workers' gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradwire.codec import Dense, Scheme, TopK, decode
from gradwire.errors import ConfigError, ManifestMismatch
from gradwire.exchange import Aggregate
from gradwire.manifest import Manifest, Role
from gradwire.optim.accumulate import set_gradients, suit_gradients
from gradwire.optim.buffers import Buffers
from gradwire.optim.residual import Residual
from gradwire.optim.share import OVERFLOW, ShareMean, Uplink, set_learning_rates
from gradwire.optim.tensors import group_numbers, load_group_numbers, require_no_closure, tensors_of
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
        if isinstance(scheme, TopK) and scheme.update == "sign":
            raise ConfigError("update = 'sign' leaves no gradient to step on: use 'coefficients', or gradwire.DeMo")
        method = f"gradients:{type(optimizer).__name__}{self._tensors.layout(optimizer)}"
        self._manifest = self._tensors.manifest(method, scheme)
        self._clip_norm = clip_norm
        self.residual = Residual(residual_decay if isinstance(scheme, TopK) else 0.0)
        self._share = ShareMean(session, self._tensors.trained)
        self._uplink = Uplink(session, self._tensors, self._manifest, self.residual)
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
        if trained.overflowed:
            self._session.abstain(OVERFLOW)
            return
        rates = [float(group["lr"]) for group in self.param_groups]
        self._uplink.hand_in(trained.gradients, trained.loss, rates)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, which a plain one can load, with the residual under "gradwire"."""
        return {**self.optimizer.state_dict(), "gradwire": self.residual.state_dict(self._session.round)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what is this worker's own: the residual, for the round that it was saved at.

        The rest is the run's, and came with it. To start a run from a checkpoint, load it into the model and the torch
        optimizer before wrapping that.
        """
        self.residual.load_state_dict(state_dict.get("gradwire"), self._manifest)

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
            suit_gradients(self.optimizer)
            self.optimizer.step()
            # Lest the next batch's gradient be added to this mean: the loader applies rounds, too.
            self.optimizer.zero_grad(set_to_none=True)
        self._buffers.apply(buffers)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Weights, buffers, and the wrapped optimizer's state, with the numbers that it keeps in its groups."""
        state = {**self._tensors.snapshot(), **group_numbers(self.optimizer)}
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
        load_group_numbers(self.optimizer, state)

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
