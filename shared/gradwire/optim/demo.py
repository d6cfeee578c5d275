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
from gradwire.optim.share import Exchange, ShareMean, set_learning_rates
from gradwire.optim.tensors import tensors_of
from gradwire.session import Session

DEFAULT = TopK(k=32, transform="dct", normalization="senders")


class DeMo(torch.optim.Optimizer):
    """Decoupled momentum. One step of it takes a whole round.

    `step` adds each batch's gradient to the share's mean. After the share's last batch, per parameter:

        momentum = decay * momentum + lr * gradient
        sent     = the k largest DCT coefficients of every 64 x 64 tile; momentum -= sent
        weight   = weight * (1 - lr * weight_decay) - lr * sign(mean of what the workers sent)

    Args:
        params: parameters, named parameters or groups of either, as of any torch optimizer; `lr` and `weight_decay` may
            differ by group.
        lr: learning rate, of the momentum and of the update.
        session: from gradwire.connect. Joining, and loading the run's weights, happens here.
        model: where names and buffers come from; needed unless `params` are named.
        scheme: how the momentum is encoded; default TopK(k=32, transform="dct", normalization="senders").
        decay: of the momentum, 0 to 1.
        update: "sign": the aggregator finishes the update, one bit comes per weight, and all workers have the same
            weights to the bit. "coefficients": each worker takes the sign itself, and near 0 devices differ.
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
        update: Literal["sign", "coefficients"] = "sign",
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value < 0:
                raise ConfigError(f"{name} = {value}: allowed is 0 or more")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._session = session
        self._tensors = tensors_of(self, model)
        self._manifest = self._tensors.manifest("demo", dataclasses.replace(scheme, update=update))
        self._buffers = Buffers(self._tensors.averaged)
        self._share = ShareMean(session, self._tensors.trained)
        self.residual = Residual(decay)
        self._exchange = Exchange(session, self._tensors, self._manifest, self.residual)
        session.join(self)

    def step(self, loss: torch.Tensor | float | None = None) -> None:  # type: ignore[override]
        """Takes the gradients of one batch of `session.loader`; after the share's last one, runs the round's exchange.

        loss: the batch's mean loss, for the run's records. Raises GradwireError outside the loader.
        """
        trained = self._share.add(self, loss)
        if trained is None:
            return
        gradients, mean_loss = trained
        groups = self._tensors.groups(self)
        updates = {name: gradient.mul_(groups[name]["lr"]) for name, gradient in gradients.items()}
        self._exchange.hand_in(updates, mean_loss, [float(group["lr"]) for group in self.param_groups])

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer's, with the momentum under "gradwire"."""
        return {**super().state_dict(), "gradwire": self.residual.state_dict(self._session.round)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over groups and momentum; the momentum only if it is of the round that the worker is at."""
        super().load_state_dict(state_dict)
        self.residual.load_state_dict(state_dict.get("gradwire"), self._session.round)

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
            weight = parameter.to(torch.float32).mul_(1 - group["lr"] * group["weight_decay"])
            parameter.copy_(weight.sub_(mean.sign_().mul_(group["lr"])).to(parameter.dtype))
        self._buffers.apply(buffers)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Weights and buffers; the momentum is this worker's own."""
        return self._tensors.snapshot()

    def load_snapshot(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over another replica's weights and buffers; the momentum starts from zero."""
        self._tensors.restore(state)
        self._buffers.keep()
        self.residual.reset()
