"""A reference of the contribution format that shares no code with the product: plain numpy and Python integers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Shape = tuple[int, ...]

DENSE, U8, U16, GAP8 = 1, 2, 3, 4


@dataclass(frozen=True)
class Dense:
    """Every element, in row-major order."""

    values: str

    def as_json(self) -> str:
        """The scheme as the golden file holds it."""
        return json.dumps({"kind": "dense", **asdict(self)})


@dataclass(frozen=True)
class TopK:
    """The largest entries of every chunk."""

    k: int
    chunk: int
    layout: str
    values: str
    indices: str
    dense_below: int = 4096

    def as_json(self) -> str:
        """The scheme as the golden file holds it."""
        return json.dumps({"kind": "top_k", **asdict(self)})


Scheme = Dense | TopK


@dataclass(frozen=True)
class Contribution:
    """What travels for one tensor."""

    form: int
    values: bytes = b""
    indices: bytes = b""
    scales: bytes = b""


@dataclass(frozen=True)
class Chunk:
    """One chunk: where its coefficients lie in the row-major tensor, and how many of them are kept."""

    places: list[int]
    kept: int


# Numbers.


def float32_bits(value: np.float32) -> int:
    """The 32 bits of a float32."""
    return int(np.float32(value).view(np.uint32))


def float32_from_bits(bits: int) -> np.float32:
    """The float32 that has these 32 bits."""
    return np.uint32(bits).view(np.float32)


def bf16_bits(value: np.float32) -> int:
    """The upper 16 bits after rounding to nearest, ties to even."""
    upper, lower = divmod(float32_bits(value), 1 << 16)
    half = 1 << 15
    if lower > half or (lower == half and upper % 2 == 1):
        upper += 1
    return upper


def bf16_bytes(numbers: Iterable[np.float32]) -> bytes:
    """Two bytes each, little-endian."""
    return b"".join(bf16_bits(number).to_bytes(2, "little") for number in numbers)


def fp32_bytes(numbers: Iterable[np.float32]) -> bytes:
    """Four bytes each, little-endian."""
    return b"".join(float32_bits(number).to_bytes(4, "little") for number in numbers)


def sign_bytes(numbers: Sequence[np.float32]) -> bytes:
    """One bit each from the least significant bit on; 1 is negative, and no zero is negative."""
    packed = bytearray((len(numbers) + 7) // 8)
    for position, number in enumerate(numbers):
        if number < 0:
            packed[position // 8] |= 1 << (position % 8)
    return bytes(packed)


def mean_magnitude(numbers: Sequence[np.float32]) -> np.float32:
    """The sum in float32, one after the other, divided in float32 by their number."""
    total = np.float32(0)
    for number in numbers:
        total = np.float32(total + abs(number))
    return np.float32(total / np.float32(len(numbers)))


# Chunks.


def largest_divisor(dimension: int, chunk: int) -> int:
    """The largest divisor of the dimension that is at most sqrt(chunk)."""
    return max(d for d in range(1, dimension + 1) if dimension % d == 0 and d * d <= chunk)


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns of the 2-D view that is cut into tiles."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def tile_sides(shape: Shape, chunk: int) -> tuple[int, int]:
    """Height and width of a tile. The one row of a tensor of fewer than two dimensions has height 1."""
    rows, columns = as_matrix(shape)
    return largest_divisor(rows, chunk), largest_divisor(columns, chunk)


def lies_flat(shape: Shape, scheme: TopK) -> bool:
    """Whether the chunks are runs: asked for, or because a tile would hold fewer than chunk/4 coefficients."""
    if scheme.layout == "flat":
        return True
    height, width = tile_sides(shape, scheme.chunk)
    return 4 * height * width < scheme.chunk


def chunks_of(shape: Shape, scheme: TopK) -> list[Chunk]:
    """The chunks in the order in which they are sent."""
    count = math.prod(shape)
    chunks = []
    if lies_flat(shape, scheme):
        for start in range(0, count, scheme.chunk):
            places = list(range(start, min(start + scheme.chunk, count)))
            kept = -(-scheme.k * len(places) // scheme.chunk)
            chunks.append(Chunk(places, kept))
        return chunks
    rows, columns = as_matrix(shape)
    height, width = tile_sides(shape, scheme.chunk)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            places = [row * columns + left + column for row in range(top, top + height) for column in range(width)]
            chunks.append(Chunk(places, min(scheme.k, height * width)))
    return chunks


def select(coefficients: Sequence[np.float32], kept: int) -> list[int]:
    """Indices of the largest magnitudes, the lower index first among equals, in ascending order."""
    ranked = sorted(range(len(coefficients)), key=lambda index: (-abs(float(coefficients[index])), index))
    return sorted(ranked[:kept])


# Indices.


def u8_bytes(chosen: Sequence[Sequence[int]]) -> bytes:
    """One byte an index."""
    return b"".join(index.to_bytes(1, "little") for indices in chosen for index in indices)


def u16_bytes(chosen: Sequence[Sequence[int]]) -> bytes:
    """Two bytes an index."""
    return b"".join(index.to_bytes(2, "little") for indices in chosen for index in indices)


def gap8_bytes(chosen: Sequence[Sequence[int]]) -> bytes:
    """Gaps from the entry before, starting afresh in each chunk."""
    coded = bytearray()
    for indices in chosen:
        expected = 0
        for index in indices:
            gap = index - expected
            coded += bytes([255] * (gap // 255) + [gap % 255])
            expected = index + 1
    return bytes(coded)


def index_forms(chosen: Sequence[Sequence[int]], chunk: int) -> dict[int, bytes]:
    """Every form that the chunk length allows, in the order that decides between equal lengths."""
    forms = {U8: u8_bytes(chosen)} if chunk <= 256 else {}
    return forms | {U16: u16_bytes(chosen), GAP8: gap8_bytes(chosen)}


# The format.


def encode_dense(numbers: Sequence[np.float32], values: str) -> Contribution:
    """All elements; those of a sign scheme as bf16."""
    return Contribution(DENSE, fp32_bytes(numbers) if values == "fp32" else bf16_bytes(numbers))


def travels_dense(shape: Shape, scheme: Scheme) -> bool:
    """Whether all elements travel."""
    return isinstance(scheme, Dense) or math.prod(shape) < scheme.dense_below or math.prod(shape) == 0


def encode(tensor: Floats, scheme: Scheme) -> Contribution:
    """The contribution of one tensor."""
    numbers = list(tensor.reshape(-1))
    if isinstance(scheme, Dense) or travels_dense(tensor.shape, scheme):
        return encode_dense(numbers, scheme.values)
    chosen, values, scales = [], b"", b""
    for chunk in chunks_of(tensor.shape, scheme):
        coefficients = [numbers[place] for place in chunk.places]
        indices = select(coefficients, chunk.kept)
        kept = [coefficients[index] for index in indices]
        chosen.append(indices)
        if scheme.values == "bf16":
            values += bf16_bytes(kept)
        elif scheme.values == "fp32":
            values += fp32_bytes(kept)
        else:
            values += sign_bytes(kept)
            scales += bf16_bytes([mean_magnitude(kept)])
    forms = index_forms(chosen, scheme.chunk)
    if scheme.indices == "auto":
        form = min(forms, key=lambda one: len(forms[one]))
    else:
        form = {"u8": U8, "u16": U16, "gap8": GAP8}[scheme.indices]
    return Contribution(form, values, forms[form], scales)
