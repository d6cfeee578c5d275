"""SparseLoCo: local steps, then top-k of the pseudo-gradient with error feedback, then an outer step.

Sarfi et al. 2025, "Communication Efficient LLM Pre-training with SparseLoCo"; DiLoCo (Douillard et al. 2023)
without the compression. The outer weights are float32 on the host and the outer step runs there, multiply then
subtract, so that its bits depend on no device: after every round all workers have the same weights to the bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gradwire.codec import Scheme, TopK, decode
from gradwire.device import to_host
from gradwire.errors import NonFiniteGradient
from gradwire.exchange import Aggregate, Contribution
from gradwire.manifest import Manifest, Role
from gradwire.optim.accumulate import GradientMean, set_gradients
from gradwire.optim.loss import LossMean
from gradwire.optim.residual import Residual
from gradwire.optim.tensors import tensors_of
from gradwire.session import Session


class SparseLoCo:
    """Wraps a torch optimizer that takes local (inner) steps between rounds.

    `step` steps the inner optimizer; after the share's last batch it sends what the inner steps changed, and
    continues from the outer weights. The inner optimizer's state stays with its worker.

    Args:
        inner: the inner optimizer, over the model's parameters.
        session: from gradwire.connect. Joining, and loading the run's state, happens here.
        inner_steps: at most so many inner steps a round; a share of more batches accumulates gradients over several.
            None: one inner step per batch.
        model: where names and buffers come from; needed unless `inner` was made from named parameters.
        scheme: how pseudo-gradients are encoded; default TopK(k=64, chunk=4096, normalization="senders").
        outer_lr: step size of the outer step.
        residual_decay: of the error feedback; 0 turns it off.
        clip_norm: every inner step's gradient is clipped to this L2 norm; None: not at all.

    Raises ManifestMismatch if the run's tensors, method or data are not these, ConfigError where names are missing.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        session: Session,
        *,
        inner_steps: int | None = None,
        model: nn.Module | None = None,
        scheme: Scheme | None = None,
        outer_lr: float = 1.0,
        residual_decay: float = 0.95,
        clip_norm: float | None = None,
    ) -> None:
        self.inner = inner
        self._session = session
        self._inner_steps = inner_steps
        self._tensors = tensors_of(inner, model)
        self._manifest = self._tensors.manifest("sparseloco", scheme or TopK(normalization="senders"))
        self._outer_lr = outer_lr
        self._clip_norm = clip_norm
        self.residual = Residual(residual_decay)
        self._mean = GradientMean(self._tensors.trained)
        self._loss = LossMean()
        self._outer: dict[str, torch.Tensor] = {}
        self._take_outer()
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
        self._loss.add(loss, batch.samples)
        accumulate = math.ceil(batch.batches / self._inner_steps) if self._inner_steps else 1
        first = batch.index - batch.index % accumulate
        if accumulate > 1:
            group_samples = min(batch.batch_size * accumulate, batch.share_samples - batch.batch_size * first)
            self._mean.add(batch.samples / group_samples)
        if batch.last or batch.index - first == accumulate - 1:
            if accumulate > 1:
                set_gradients(self._tensors.trained, self._mean.take())
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(self._tensors.trained.values(), self._clip_norm)
            self.inner.step()
        if batch.last:
            self._exchange()

    def _exchange(self) -> None:
        loss = self._loss.take()
        updates: dict[str, torch.Tensor | None] = dict(self._tensors.averaged)
        with torch.no_grad():
            for name, parameter in self._tensors.trained.items():
                updates[name] = self._outer[name].to(parameter.device) - parameter.to(torch.float32)
        try:
            with self._session.phase("encode"):
                encoded = self.residual.compress(self._manifest, updates)
        except NonFiniteGradient as error:
            # Moments that went NaN with the weights would spoil every round to come.
            self.inner.state.clear()
            self._session.abstain(str(error))
            return
        self._session.exchange(Contribution(encoded, loss, [self._outer_lr]))

    def _take_outer(self) -> None:
        # Keyed by name; parameters and buffers can't share one, as both are attributes of the same modules.
        held = {**self._tensors.trained, **self._tensors.averaged}
        self._outer = {name: to_host(tensor).to(torch.float32).clone() for name, tensor in held.items()}

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
        for entry, encoded in zip(self._manifest, aggregate.tensors, strict=True):
            if encoded is None:
                continue
            mean = decode(encoded, entry.scheme, entry.shape)
            if entry.role is Role.PARAMETER:
                self._outer[entry.name].sub_(mean.mul_(rate))
            else:
                self._outer[entry.name] = mean
        with torch.no_grad():
            for name, tensor in (*self._tensors.trained.items(), *self._tensors.averaged.items()):
                tensor.copy_(self._outer[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Outer weights in float32, and buffers; the inner optimizer's state is this worker's own."""
        outer = {f"weight/{name}": self._outer[name] for name in self._tensors.trained}
        return {**self._tensors.snapshot(), **outer}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over another replica's outer weights and buffers; the inner optimizer starts afresh."""
        self._tensors.restore(state)
        self._take_outer()
        for name in self._tensors.trained:
            self._outer[name] = state[f"weight/{name}"].to(torch.float32)
        self.residual.reset()
        self.inner.state.clear()
