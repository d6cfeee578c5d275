"""A worker's share of a round: its mean gradient and loss, and how what came of it is handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.errors import NonFiniteGradient
from gradwire.exchange import Contribution
from gradwire.manifest import Manifest
from gradwire.optim.accumulate import GradientMean
from gradwire.optim.loss import LossMean
from gradwire.optim.residual import Residual
from gradwire.session import Session


class ShareMean:
    """Adds up the gradients and losses of a share's batches, weighted by their samples."""

    def __init__(self, session: Session, gradients: GradientMean) -> None:
        self._session = session
        self._gradients = gradients
        self._loss = LossMean()

    def add(
        self, optimizer: object, loss: torch.Tensor | float | None
    ) -> tuple[dict[str, torch.Tensor], float | None] | None:
        """Takes the present gradients as those of the loader's batch.

        Returns (mean gradient by name, mean loss) after the share's last batch, else None. Raises GradwireError outside
        the loader.
        """
        batch = self._session.take_batch()
        self._gradients.add(batch.samples / batch.share_samples / loss_scale(optimizer))
        self._loss.add(loss, batch.samples)
        return (self._gradients.take(), self._loss.take()) if batch.last else None


def hand_in(
    session: Session,
    residual: Residual,
    manifest: Manifest,
    updates: Mapping[str, torch.Tensor | None],
    loss: float | None,
    learning_rates: Sequence[float],
) -> bool:
    """Contributes the updates, by name, and takes the round's aggregate; abstains if one is not finite.

    Returns whether it contributed.
    """
    try:
        with session.phase("encode"):
            encoded = residual.compress(manifest, updates)
    except NonFiniteGradient as error:
        session.abstain(str(error))
        return False
    session.exchange(Contribution(encoded, loss, learning_rates))
    return True


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
