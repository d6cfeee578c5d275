"""Coefficient values as bytes: bf16 rounded to nearest even, float32 as they are, or signs; always little-endian.

Bytes come about by reinterpretation on the host (`view(torch.int16)`): numpy has no bf16, and converting
copies from some devices are wrong. One bit with a scale per chunk follows 1-bit SGD (Seide et al., 2014).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from gradwire.codec.scheme import ValueKind, WholeKind
from gradwire.codec.tiles import Ints
from gradwire.errors import MalformedTensor, NonFiniteGradient

WIDTH: Final[dict[ValueKind, int]] = {"bf16": 2, "fp32": 4}  # bytes per value; signs have none
SCALE_BYTES: Final = 2
ONE: Final = 0x3F800000  # 1.0 as float32


def pack(values: torch.Tensor, kind: WholeKind, *, name: str) -> bytes:
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


def unpack(data: bytes | memoryview, kind: WholeKind) -> torch.Tensor:
    """The values in `data` as a new 1-D float32 host tensor; a part of a value raises MalformedTensor."""
    if len(data) % WIDTH[kind]:
        raise MalformedTensor(f"{len(data)} bytes of values: {kind} values have {WIDTH[kind]} each")
    if kind == "fp32":
        return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    high = np.frombuffer(data, dtype="<u2").astype(np.uint32)
    np.left_shift(high, 16, out=high)
    return torch.from_numpy(high.view(np.float32))


def pack_signs(values: torch.Tensor, counts: Ints, *, name: str) -> tuple[bytes, bytes]:
    """(signs, scales) of a float32 host tensor that holds `counts` values of each chunk, one after the other.

    A scale is the mean magnitude of its chunk, summed in float32 in order.
    """
    rows_of_chunks = _rows(np.abs(values.numpy()), counts)
    with np.errstate(over="ignore"):
        sums = np.concatenate([np.cumsum(rows, axis=1, dtype=np.float32)[:, -1] for rows in rows_of_chunks])
    scales = pack(torch.from_numpy(sums / counts.astype(np.float32)), "bf16", name=name)
    return sign_bits(values, counts), scales


def unpack_signs(signs: bytes | memoryview, scales: bytes | memoryview, counts: Ints) -> torch.Tensor:
    """The inverse: the chunk's scale with each value's sign, a new 1-D float32 host tensor."""
    magnitudes = np.frombuffer(scales, dtype="<u2").astype(np.uint32)
    magnitudes <<= 16
    return _signed(signs, magnitudes, counts)


def sign_bits(values: torch.Tensor, counts: Ints) -> bytes:
    """One bit per value of a float32 host tensor, 1 where it is below 0; every chunk starts on a byte, LSB first."""
    negative = (values < 0).numpy()
    return b"".join(np.packbits(rows, axis=1, bitorder="little").tobytes() for rows in _rows(negative, counts))


def signs_of(data: bytes | memoryview, counts: Ints) -> torch.Tensor:
    """+1.0 and -1.0 as `sign_bits` wrote them: a new 1-D float32 host tensor."""
    return _signed(data, np.full(len(counts), ONE, dtype=np.uint32), counts)


def _signed(data: bytes | memoryview, magnitudes: npt.NDArray[np.uint32], counts: Ints) -> torch.Tensor:
    """Each chunk's magnitude, float32 bits, with the signs in `data`."""
    raw, taken, chunk, signed = np.frombuffer(data, dtype=np.uint8), 0, 0, [np.empty(0, np.uint32)]
    for count, chunks in _runs(counts):
        width = (count + 7) // 8
        window = raw[taken : taken + chunks * width].reshape(chunks, width)
        bits = np.unpackbits(window, axis=1, count=count, bitorder="little").astype(np.uint32)
        bits <<= 31
        bits |= magnitudes[chunk : chunk + chunks, None]
        signed.append(bits.reshape(-1))
        taken, chunk = taken + chunks * width, chunk + chunks
    return torch.from_numpy(np.concatenate(signed).view(np.float32))


def read(data: bytes | memoryview, scales: bytes | memoryview, kind: ValueKind, counts: Ints) -> torch.Tensor:
    """The values of chunks that have `counts` of them, of any kind: a new 1-D float32 host tensor."""
    return unpack_signs(data, scales, counts) if kind == "sign" else unpack(data, kind)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element of a float tensor, on any device, is NaN or infinite."""
    # A sum is finite only if every term is. It may overflow without one that isn't, so only then look at each.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor.contiguous()).all())


def chunk_bytes(kind: ValueKind, counts: Ints) -> Ints:
    """How many bytes of values each chunk has, int64."""
    return (counts + 7) // 8 if kind == "sign" else counts * WIDTH[kind]


def check(data: bytes | memoryview, scales: bytes | memoryview, kind: ValueKind, counts: Ints) -> None:
    """Raises MalformedTensor for a value that is NaN or infinite, a scale that is one or negative, a spare bit set.

    counts: values of each chunk; of no meaning unless they are signs.
    """
    if kind == "sign":
        _check_spare_bits(data, counts)
        if (np.frombuffer(scales, dtype="<u2") >= 0x7F80).any():
            raise MalformedTensor("a scale is negative or not finite")
        return
    broken = _non_finite(np.frombuffer(data, dtype=f"<i{WIDTH[kind]}"), 0x7F80 if kind == "bf16" else 0x7F800000)
    if broken:
        raise MalformedTensor(f"{broken} of {len(data) // WIDTH[kind]} values are not finite")


def _check_spare_bits(data: bytes | memoryview, counts: Ints) -> None:
    raw = np.frombuffer(data, dtype=np.uint8)
    ends = np.cumsum((counts + 7) // 8)[counts > 0] - 1
    spare = 0xFF << (counts[counts > 0] + 7) % 8 + 1
    if (raw[ends] & spare).any():
        raise MalformedTensor("spare bits are set after the signs of a chunk")


def _rows(array: npt.NDArray[Any], counts: Ints) -> list[npt.NDArray[Any]]:
    """Runs of chunks with as many values each, as matrices of one row a chunk."""
    rows, taken = [], 0
    for count, chunks in _runs(counts):
        rows.append(array[taken : taken + chunks * count].reshape(chunks, count))
        taken += chunks * count
    return rows


def _runs(counts: Ints) -> list[tuple[int, int]]:
    """(values, chunks) of every run of neighbouring chunks with as many values."""
    if not len(counts):
        return []
    borders = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(counts)]
    return [(int(counts[low]), high - low) for low, high in itertools.pairwise(borders)]


def _non_finite(bits: npt.NDArray[np.signedinteger], exponent: int) -> int:
    """How many have all exponent bits set: infinities and NaNs."""
    return int(np.count_nonzero((bits & exponent) == exponent))
