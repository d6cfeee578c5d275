"""Coefficient values as bytes: bf16 rounded to nearest even, or float32 as they are; always little-endian.

Bytes come about by reinterpretation on the host (`view(torch.int16)`): numpy has no bf16, and converting
copies from some devices are wrong.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gradwire.codec.scheme import ValueKind
from gradwire.errors import MalformedTensor, NonFiniteGradient

WIDTH: Final[dict[ValueKind, int]] = {"bf16": 2, "fp32": 4}  # bytes per value


def pack(values: torch.Tensor, kind: ValueKind, *, name: str) -> bytes:
    """The bytes of a float32 host tensor, in row-major order.

    Raises NonFiniteGradient, naming `name` and how many, if values are not finite, or not once rounded.
    """
    values = values.contiguous().view(-1)
    bits: npt.NDArray[np.signedinteger]
    if kind == "bf16":
        bits = values.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False)
        exponent = 0x7F80
    else:
        bits = values.view(torch.int32).numpy().astype("<i4", copy=False)
        exponent = 0x7F800000
    broken = _non_finite(bits, exponent)
    if broken:
        raise NonFiniteGradient(f"{name}: {broken} of {bits.size} values to be sent are not finite as {kind}")
    return bits.tobytes()


def unpack(data: bytes | memoryview, kind: ValueKind) -> torch.Tensor:
    """The values in `data` as a new 1-D float32 host tensor; a part of a value raises MalformedTensor."""
    if len(data) % WIDTH[kind]:
        raise MalformedTensor(f"{len(data)} bytes of values: {kind} values have {WIDTH[kind]} each")
    if kind == "fp32":
        return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    high = np.frombuffer(data, dtype="<u2").astype(np.uint32)
    np.left_shift(high, 16, out=high)
    return torch.from_numpy(high.view(np.float32))


def check_finite(data: bytes | memoryview, kind: ValueKind) -> None:
    """Raises MalformedTensor if a value in `data` (whole values) is NaN or infinite."""
    if kind == "bf16":
        broken = _non_finite(np.frombuffer(data, dtype="<i2"), 0x7F80)
    else:
        broken = _non_finite(np.frombuffer(data, dtype="<i4"), 0x7F800000)
    if broken:
        raise MalformedTensor(f"{broken} of {len(data) // WIDTH[kind]} values are not finite")


def _non_finite(bits: npt.NDArray[np.signedinteger], exponent: int) -> int:
    """How many have all exponent bits set: infinities and NaNs."""
    return int(np.count_nonzero((bits & exponent) == exponent))
