"""What torch.amp.GradScaler tells an optimizer that has `_step_supports_amp_scaling`.

`scaler.step(optimizer, loss)` then always calls the optimizer, with the attributes `grad_scale` and `found_inf` set.
"""

from __future__ import annotations

from typing import Any


def loss_scale(optimizer: Any) -> float:
    """What the gradients have been multiplied with; 1 where they haven't, or have been divided already."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def overflowed(optimizer: Any) -> bool:
    """Whether a gradient was found that is not finite, even if it has been clipped since."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
