"""Floating-point buffers, such as BatchNorm's statistics: their mean goes with a round's mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Buffers:
    """The averaged buffers of a model, by name, and the values that the last round gave them."""

    def __init__(self, averaged: Mapping[str, torch.Tensor]) -> None:
        self._averaged = averaged
        self.keep()

    def keep(self) -> None:
        """Takes the present values for those of the round."""
        self._values = {name: buffer.detach().clone() for name, buffer in self._averaged.items()}

    def apply(self, means: Mapping[str, torch.Tensor]) -> None:
        """Sets all to a round's means; those without one (all, in a void round) go back with the weights."""
        self._values.update(means)
        with torch.no_grad():
            for name, buffer in self._averaged.items():
                buffer.copy_(self._values[name])
