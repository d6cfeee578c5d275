"""SparseLoCo: local steps, then top-k of the pseudo-gradient with error feedback, then an outer step.

Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo"; DiLoCo (Douillard et al. 2023)
without the compression, from which the outer Nesterov momentum is. The outer weights are float32 on the host and the
outer step runs there, one rounded operation after the other, so that its bits depend on no device: after every round
all workers have the same weights to the bit.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from gradwire.codec import Scheme, TopK, decode
from gradwire.device import to_host
from gradwire.errors import ConfigError
from gradwire.exchange import Aggregate
from gradwire.manifest import Manifest, Role
from gradwire.optim.accumulate import GradientMean, set_gradients, suit_gradients
from gradwire.optim.buffers import Buffers
from gradwire.optim.loss import LossMean
from gradwire.optim.residual import Residual
from gradwire.optim.scaling import loss_scale, overflowed
from gradwire.optim.share import Uplink
from gradwire.optim.tensors import require_no_closure, tensors_of
from gradwire.session import Session
from gradwire.state import restore

DEFAULT = TopK(k=64, chunk=4096, normalization="senders")


class SparseLoCo:
    """Wraps a torch optimizer that takes local (inner) steps between rounds.

    `step` steps the inner optimizer; after the share's last batch it sends what the inner steps changed, and
    continues from the outer weights. The inner optimizer's state stays with its worker. How many inner steps a round
    has follows from the worker's share: a slow machine takes fewer, and counts for as much less.

    Args:
        inner: the inner optimizer, over the model's parameters.
        session: from gradwire.connect. Joining, and loading the run's state, happens here.
        inner_steps: at most so many inner steps a round; a share of more batches accumulates gradients over several.
            None: one inner step per batch.
        model: where names and buffers come from; needed unless `inner` was made from named parameters.
        scheme: how pseudo-gradients are encoded; default TopK(k=64, chunk=4096, normalization="senders"). With
            clip="median" the aggregator clips every worker's tensors to the median of the workers' norms.
        outer_lr: step size of the outer step.
        outer_momentum: of the outer step, Nesterov's, 0 to below 1; 0: none.
        residual_decay: of the error feedback; 0 turns it off.
        clip_norm: every inner step's gradient is clipped to this L2 norm; None: not at all.

    Raises ManifestMismatch if the run's tensors, method or data are not these, ConfigError where names are missing, a
    number is out of range, or the scheme has a transform (undoing it depends on the device).
    """

    _step_supports_amp_scaling = True  # what torch.amp.GradScaler asks for

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        session: Session,
        *,
        inner_steps: int | None = None,
        model: nn.Module | None = None,
        scheme: Scheme = DEFAULT,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        residual_decay: float = 0.95,
        clip_norm: float | None = None,
    ) -> None:
        if not 0 <= outer_momentum < 1:
            raise ConfigError(f"outer_momentum = {outer_momentum}: allowed is 0 to below 1")
        if isinstance(scheme, TopK) and scheme.transform is not None:
            raise ConfigError(
                f"SparseLoCo with transform = {scheme.transform!r}: undoing it depends on the device, and SparseLoCo "
                "keeps the weights of all workers alike to the bit; leave the transform out, or use DeMo"
            )
        require_no_closure(inner)
        self.inner = inner
        self._first_state = copy.deepcopy(inner.state_dict()["state"])
        self._session = session
        self._inner_steps = inner_steps
        self._tensors = tensors_of(inner, model)
        method = f"sparseloco:{float(outer_momentum)!r}" if outer_momentum else "sparseloco"
        self._manifest = self._tensors.manifest(method, scheme)
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._clip_norm = clip_norm
        self.residual = Residual(residual_decay)
        self._uplink = Uplink(session, self._tensors, self._manifest, self.residual)
        self._mean = GradientMean(self._tensors.trained)
        self._loss = LossMean()
        self._overflowed = False
        self._buffers = Buffers(self._tensors.averaged)
        self._velocity: dict[str, torch.Tensor] = {}
        self._outer = {
            name: to_host(parameter).to(torch.float32).clone() for name, parameter in self._tensors.trained.items()
        }
        session.join(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's, so that learning rates can be set as usual."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad."""
        self.inner.zero_grad(set_to_none)

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """Takes an inner step on one batch of `session.loader`; after the share's last one, runs the round's exchange.

        loss: the batch's mean loss, for the run's records. Raises GradwireError outside the loader.
        """
        batch = self._session.take_batch()
        if batch.index == 0:  # what a loop that was left halfway has added counts for nothing
            self._mean.take()
            self._loss.take()
            self._overflowed = False
        self._loss.add(loss, batch.samples)
        accumulate = math.ceil(batch.batches / self._inner_steps) if self._inner_steps else 1
        first = batch.index - batch.index % accumulate
        group_samples = min(batch.batch_size * accumulate, batch.share_samples - batch.batch_size * first)
        weight = batch.samples / group_samples / loss_scale(self)
        self._overflowed |= overflowed(self)
        if accumulate > 1 or weight != 1:
            self._mean.add(weight)
        if batch.last or batch.index - first == accumulate - 1:
            if accumulate > 1 or weight != 1:
                set_gradients(self._tensors.trained, self._mean.take())
            self._inner_step()
        if batch.last:
            self._hand_in()

    def _inner_step(self) -> None:
        skip, self._overflowed = self._overflowed, False
        if skip:  # as torch.amp.GradScaler does: the scale was too large
            return
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._tensors.trained.values(), self._clip_norm)
        suit_gradients(self.inner)
        self.inner.step()

    def _hand_in(self) -> None:
        self._tensors.groups(self.inner)
        updates: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, parameter in self._tensors.trained.items():
                # From where the inner steps began: in bf16 that is not quite the outer weight.
                began = self._outer[name].to(parameter.dtype).to(parameter.device)
                updates[name] = began.to(torch.float32) - parameter.to(torch.float32)
        if not self._uplink.hand_in(updates, self._loss.take(), [self._outer_lr]):
            # Moments that went NaN with the weights would spoil every round to come.
            self._forget_moments()

    def _forget_moments(self) -> None:
        first = copy.deepcopy(self._first_state)  # not empty where an optimizer makes its state at once
        self.inner.load_state_dict({**self.inner.state_dict(), "state": first})

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, which a plain one can load, with the residual under "gradwire"."""
        return {**self.inner.state_dict(), "gradwire": self.residual.state_dict(self._session.round)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what is this worker's own: the inner optimizer's state, and the residual for its round."""
        self.inner.load_state_dict(state_dict)
        self.residual.load_state_dict(state_dict.get("gradwire"), self._manifest)

    # What the session asks of a replica.

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def device(self) -> torch.device:
        return self._tensors.device

    def apply(self, aggregate: Aggregate) -> None:
        """Takes the outer step on a round's mean pseudo-gradient and continues from the outer weights."""
        self.residual.settle(counted=aggregate.counted)
        rate = aggregate.learning_rates[0] if aggregate.learning_rates else self._outer_lr
        buffers: dict[str, torch.Tensor] = {}
        for entry, encoded in zip(self._manifest, aggregate.tensors, strict=True):
            if encoded is None:
                continue
            mean = decode(encoded, entry.scheme, entry.shape)
            if entry.role is Role.BUFFER:
                buffers[entry.name] = mean
            else:
                self._outer[entry.name].sub_(self._with_momentum(entry.name, mean).mul_(rate))
        self._continue_from_outer()
        self._buffers.apply(buffers)

    def _with_momentum(self, name: str, mean: torch.Tensor) -> torch.Tensor:
        """Nesterov's: torch.optim.SGD's, in steps that can't be fused."""
        if not self._outer_momentum:
            return mean
        velocity = self._velocity.setdefault(name, torch.zeros_like(mean))
        velocity.mul_(self._outer_momentum).add_(mean)
        return mean.add_(velocity * self._outer_momentum)

    def _continue_from_outer(self) -> None:
        with torch.no_grad():
            for name, parameter in self._tensors.trained.items():
                parameter.copy_(self._outer[name].to(parameter.dtype))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Outer weights and momentum in float32, and buffers; the inner optimizer's state is this worker's own."""
        outer = {f"weight/{name}": tensor for name, tensor in self._outer.items()}
        momentum = {f"momentum/{name}": tensor for name, tensor in self._velocity.items()}
        return {**self._tensors.snapshot(), **outer, **momentum}

    def load_snapshot(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over another replica's outer weights, momentum and buffers; the inner optimizer starts afresh."""
        self._tensors.restore(state)
        for name, outer in self._outer.items():
            restore(outer, state, f"weight/{name}")
        self._velocity = {
            name: state[f"momentum/{name}"].to(torch.float32) for name in self._outer if f"momentum/{name}" in state
        }
        self._continue_from_outer()
        self._buffers.keep()
        self.residual.reset()
        self._forget_moments()
