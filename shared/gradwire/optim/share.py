"""A worker's share of a round: its mean gradient and loss, and how what came of it is handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from gradwire.errors import NonFiniteGradient
from gradwire.exchange import Contribution
from gradwire.manifest import Manifest
from gradwire.optim.accumulate import GradientMean
from gradwire.optim.loss import LossMean
from gradwire.optim.residual import Residual
from gradwire.optim.scaling import loss_scale, overflowed
from gradwire.optim.tensors import ModelTensors
from gradwire.session import Session

OVERFLOW: Final = "the scaled gradients overflowed: torch.amp.GradScaler lowers its scale"


@dataclass(frozen=True)
class Trained:
    """A share that is trained: its mean gradient by name, and its mean loss.

    overflowed: whether torch.amp.GradScaler found a gradient that is not finite: its scale was too large.
    """

    gradients: dict[str, torch.Tensor]
    loss: float | None
    overflowed: bool


class ShareMean:
    """Adds up the gradients and losses of a share's batches, weighted by their samples."""

    def __init__(self, session: Session, parameters: Mapping[str, nn.Parameter]) -> None:
        self._session = session
        self._gradients = GradientMean(parameters)
        self._loss = LossMean()
        self._overflowed = False

    def add(self, optimizer: object, loss: torch.Tensor | float | None) -> Trained | None:
        """Takes the present gradients as those of the loader's batch; the share, after its last batch.

        Raises GradwireError outside the loader.
        """
        batch = self._session.take_batch()
        if batch.index == 0:  # what a loop that was left halfway has added counts for nothing
            self._gradients.take()
            self._loss.take()
            self._overflowed = False
        self._gradients.add(batch.samples / batch.share_samples / loss_scale(optimizer))
        self._loss.add(loss, batch.samples)
        self._overflowed |= overflowed(optimizer)
        return Trained(self._gradients.take(), self._loss.take(), self._overflowed) if batch.last else None


@dataclass(frozen=True)
class Uplink:
    """How a worker hands in what a share came to, and takes the round's aggregate."""

    session: Session
    tensors: ModelTensors
    manifest: Manifest
    residual: Residual

    def hand_in(self, updates: Mapping[str, torch.Tensor], loss: float | None, learning_rates: Sequence[float]) -> bool:
        """Contributes the updates, by name, and the buffers; abstains if not all are finite.

        Returns whether it contributed.
        """
        self.residual.reach(self.session.round)
        try:
            with self.session.phase("encode"):
                encoded = self.residual.compress(self.manifest, {**updates, **self.tensors.averaged})
        except NonFiniteGradient as error:
            self.session.abstain(str(error))
            return False
        self.session.exchange(Contribution(encoded, loss, learning_rates))
        return True


def set_learning_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Gives groups the rates of a round, one each."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):  # as some optimizers under torch.compile want it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
