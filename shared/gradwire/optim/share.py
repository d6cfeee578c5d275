"""A worker's share of a round: its mean gradient and loss, and how what came of it is handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradwire.errors import NonFiniteGradient
from gradwire.exchange import Contribution
from gradwire.manifest import Manifest
from gradwire.optim.accumulate import GradientMean
from gradwire.optim.loss import LossMean
from gradwire.optim.residual import Residual
from gradwire.optim.tensors import ModelTensors
from gradwire.session import Session


class ShareMean:
    """Adds up the gradients and losses of a share's batches, weighted by their samples."""

    def __init__(self, session: Session, parameters: Mapping[str, nn.Parameter]) -> None:
        self._session = session
        self._gradients = GradientMean(parameters)
        self._loss = LossMean()

    def add(
        self, optimizer: object, loss: torch.Tensor | float | None
    ) -> tuple[dict[str, torch.Tensor], float | None] | None:
        """Takes the present gradients as those of the loader's batch.

        Returns (mean gradient by name, mean loss) after the share's last batch, else None. Raises GradwireError outside
        the loader.
        """
        batch = self._session.take_batch()
        if batch.index == 0:  # what a loop that was left halfway has added counts for nothing
            self._gradients.take()
            self._loss.take()
        self._gradients.add(batch.samples / batch.share_samples / loss_scale(optimizer))
        self._loss.add(loss, batch.samples)
        return (self._gradients.take(), self._loss.take()) if batch.last else None


@dataclass(frozen=True)
class Exchange:
    """A worker's side of a round's exchange."""

    session: Session
    tensors: ModelTensors
    manifest: Manifest
    residual: Residual

    def hand_in(self, updates: Mapping[str, torch.Tensor], loss: float | None, learning_rates: Sequence[float]) -> bool:
        """Contributes the updates, by name, and the buffers, and applies the aggregate; abstains if not all are finite.

        Returns whether it contributed.
        """
        try:
            with self.session.phase("encode"):
                encoded = self.residual.compress(self.manifest, {**updates, **self.tensors.averaged})
        except NonFiniteGradient as error:
            self.session.abstain(str(error))
            return False
        self.session.exchange(Contribution(encoded, loss, learning_rates))
        return True


def set_learning_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Gives groups the rates of a round, which has those of the first 64."""
    for group, rate in zip(groups, rates, strict=False):
        if isinstance(group["lr"], torch.Tensor):  # as some optimizers under torch.compile want it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def loss_scale(optimizer: Any) -> float:
    """What torch.amp.GradScaler has multiplied the gradients with; 1 where it hasn't, or has divided already.

    `scaler.step(optimizer, loss)` sets `grad_scale` and `found_inf` on optimizers with `_step_supports_amp_scaling`.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def overflowed(optimizer: Any) -> bool:
    """Whether torch.amp.GradScaler found a gradient that is not finite."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
