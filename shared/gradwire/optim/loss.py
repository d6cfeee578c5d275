"""The mean loss of a share."""

from __future__ import annotations

import math

import torch

from gradwire.errors import GradwireError


class LossMean:
    """Adds up batch losses weighted by their samples; reads them from the device only once, at the end."""

    def __init__(self) -> None:
        self._losses: list[tuple[torch.Tensor | float, int]] = []

    def add(self, loss: torch.Tensor | float | None, samples: int) -> None:
        """Adds a batch's mean loss, where there is one. Raises GradwireError for a closure."""
        if callable(loss):
            raise GradwireError("optimizer.step(loss) takes the batch's loss, not a closure that computes it")
        if loss is not None:
            self._losses.append((loss.detach() if isinstance(loss, torch.Tensor) else loss, samples))

    def take(self) -> float | None:
        """The mean, None where no loss was given or it is not finite; starts anew."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        mean = sum(float(loss) * samples for loss, samples in losses) / sum(samples for _, samples in losses)
        return mean if math.isfinite(mean) else None
