"""A mean of gradients over several batches, weighted by their samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class GradientMean:
    """Adds up gradients batch by batch. One batch of weight 1 leaves its gradient bit for bit as it was."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._sum: dict[str, torch.Tensor] = {}

    def add(self, weight: float) -> None:
        """Adds every parameter's present gradient, times its batch's part of all samples (0 to 1)."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.detach()
            gradient = (gradient.coalesce().to_dense() if gradient.is_sparse else gradient).to(torch.float32)
            if weight != 1.0:
                gradient = gradient * weight
            total = self._sum.get(name)
            self._sum[name] = gradient.clone() if total is None else total.add_(gradient)

    def take(self) -> dict[str, torch.Tensor]:
        """The mean by name, float32, without those that never had a gradient; starts anew."""
        mean, self._sum = self._sum, {}
        return mean


def set_gradients(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, torch.Tensor]) -> None:
    """Gives every parameter its gradient, in its own dtype and on its own device; None where there is none."""
    for name, parameter in parameters.items():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device).to(parameter.dtype)


def suit_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Makes gradients sparse for the one optimizer that takes no others."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)
