"""DeMo: the fast-moving part of each worker's momentum is exchanged, and the weights follow the mean's sign.

Peng et al. 2024, "DeMo: Decoupled Momentum Optimization". The momentum is a residual: what is sent of it leaves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from gradwire.codec import TopK, decode
from gradwire.errors import ConfigError
from gradwire.exchange import Aggregate
from gradwire.manifest import Manifest, Role
from gradwire.optim.buffers import Buffers
from gradwire.optim.residual import Residual
from gradwire.optim.share import OVERFLOW, ShareMean, Uplink, set_learning_rates
from gradwire.optim.tensors import group_numbers, load_group_numbers, tensors_of
from gradwire.session import Session
from gradwire.state import restore

DEFAULT = TopK(transform="dct", normalization="senders", update="sign")


class DeMo(torch.optim.Optimizer):
    """Decoupled momentum. One step of it takes a whole round.

    `step` adds each batch's gradient to the share's mean. After the share's last batch, per parameter:

        momentum = decay * momentum + lr * gradient
        sent     = the k largest DCT coefficients of every 64 x 64 tile; momentum -= sent
        weight   = weight * (1 - lr * weight_decay) - lr * sign(mean of what the workers sent)

    Tensors that travel whole (of fewer than `dense_below` elements) keep no momentum but what was rounded off. Weights
    that are not float32 follow float32 ones kept here.

    Args:
        params: parameters, named parameters or groups of either, as of any torch optimizer; `lr` and `weight_decay` may
            differ by group.
        lr: learning rate, of the momentum and of the update.
        session: from gradwire.connect. Joining, and loading the run's weights, happens here.
        model: where names and buffers come from; needed unless `params` are named.
        scheme: how the momentum is encoded; default TopK(transform="dct", normalization="senders", update="sign").
        decay: of the momentum, 0 to 1.
        update: in place of the scheme's. "sign": the aggregator finishes the update, one bit comes per weight, and all
            workers have the same weights to the bit. "coefficients": each worker takes the sign itself, and near 0
            devices differ.
        weight_decay: decoupled, as in AdamW.

    Raises ManifestMismatch if the run's tensors, method or data are not these, ConfigError where names are missing or
    a number is out of range.
    """

    _step_supports_amp_scaling = True  # what torch.amp.GradScaler asks for

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        session: Session,
        *,
        model: nn.Module | None = None,
        scheme: TopK = DEFAULT,
        decay: float = 0.999,
        update: Literal["sign", "coefficients"] | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value < 0:
                raise ConfigError(f"{name} = {value}: allowed is 0 or more")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._session = session
        self._tensors = tensors_of(self, model)
        scheme = dataclasses.replace(scheme, update=update or scheme.update)
        self._manifest = self._tensors.manifest(f"demo{self._tensors.layout(self)}", scheme)
        self._wide = {
            name: parameter.detach().to(torch.float32)
            for name, parameter in self._tensors.trained.items()
            if parameter.dtype != torch.float32
        }
        self._buffers = Buffers(self._tensors.averaged)
        self._share = ShareMean(session, self._tensors.trained)
        self.residual = Residual(decay)
        self._uplink = Uplink(session, self._tensors, self._manifest, self.residual)
        session.join(self)

    def step(self, loss: torch.Tensor | float | None = None) -> None:  # type: ignore[override]
        """Takes the gradients of one batch of `session.loader`; after the share's last one, runs the round's exchange.

        loss: the batch's mean loss, for the run's records. Raises GradwireError outside the loader.
        """
        trained = self._share.add(self, loss)
        if trained is None:
            return
        groups = self._tensors.groups(self)
        if trained.overflowed:
            self._session.abstain(OVERFLOW)
            return
        updates = {name: gradient.mul_(groups[name]["lr"]) for name, gradient in trained.gradients.items()}
        self._uplink.hand_in(updates, trained.loss, [float(group["lr"]) for group in self.param_groups])

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's, with the momentum under "gradwire"."""
        return {**super().state_dict(), "gradwire": self.residual.state_dict(self._session.round)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups, and the momentum for the round that it was saved at."""
        super().load_state_dict(state_dict)
        self.residual.load_state_dict(state_dict.get("gradwire"), self._manifest)

    # What the session asks of a replica.

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def device(self) -> torch.device:
        return self._tensors.device

    @torch.no_grad()
    def apply(self, aggregate: Aggregate) -> None:
        """Moves every weight by the sign of a round's mean, with the learning rates of that round."""
        self.residual.settle(counted=aggregate.counted)
        if not aggregate.void:
            set_learning_rates(self.param_groups, aggregate.learning_rates)
        groups = self._tensors.groups(self)
        buffers: dict[str, torch.Tensor] = {}
        for entry, encoded in zip(self._manifest, aggregate.tensors, strict=True):
            if encoded is None:
                continue
            if entry.role is Role.BUFFER:
                buffers[entry.name] = decode(encoded, entry.scheme, entry.shape)
                continue
            parameter, group = self._tensors.trained[entry.name], groups[entry.name]
            mean = decode(encoded, entry.scheme, entry.shape, device=parameter.device)
            # lr * sign is exact, so these bits depend on no device, fused multiply-add or not.
            weight = self._wide.get(entry.name, parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean.sign_().mul_(group["lr"]))
            if weight is not parameter:
                parameter.copy_(weight.to(parameter.dtype))
        self._buffers.apply(buffers)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Weights in float32, buffers, and the groups' numbers; the momentum is this worker's own."""
        wide = {f"weight/{name}": weight for name, weight in self._wide.items()}
        return {**self._tensors.snapshot(), **wide, **group_numbers(self)}

    def load_snapshot(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over another replica's weights, buffers and groups' numbers; the momentum starts from zero."""
        self._tensors.restore(state)
        for name, weight in self._wide.items():
            restore(weight, state, f"weight/{name}")
        load_group_numbers(self, state)
        self._buffers.keep()
        self.residual.reset()
