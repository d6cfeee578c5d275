"""Write encodings.npz: golden vectors of the contribution format, encoded by reference.py.

Run it as `python tests/golden/write_encodings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from reference import DENSE, GAP8, U8, U16, Dense, Floats, Scheme, Shape, TopK, encode, float32_from_bits

SEED = 20240611
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Case:
    """A tensor, a scheme, and the index form that the case is there to show."""

    name: str
    tensor: Floats
    scheme: Scheme
    form: int


# Tensors.


def bits_tensor(bits: Sequence[int], shape: Shape) -> Floats:
    """A tensor from the 32 bits of each element."""
    return np.array(bits, np.uint32).view(np.float32).reshape(shape)


def special_bits() -> list[int]:
    """Zeros, subnormals, half-way values of both parities, and the largest that round to a finite bf16: 24 in all."""
    positive = [
        0x00000000,  # 0
        0x00000001,  # the least float32 subnormal, 0 in bf16
        0x00008000,  # half-way between 0 and the least bf16 subnormal, to 0
        0x00008001,  # just above
        0x00018000,  # half-way, to the even bf16 subnormal 2
        0x00345678,  # a float32 subnormal that becomes a subnormal bf16
        0x007FFFFF,  # the largest float32 subnormal, normal in bf16
        0x3F808000,  # half-way, below is even
        0x3F818000,  # half-way, below is odd
        0x3FFF8000,  # half-way, up into the next power of two
        0x7F7E8000,  # half-way, down to the even one below the largest
        0x7F7F7FFF,  # the largest float32 that rounds to a finite bf16
    ]
    return positive + [bits | 0x80000000 for bits in positive]


def spikes(count: int, places: dict[int, float]) -> Floats:
    """Zeros but for the given places."""
    tensor = np.zeros(count, np.float32)
    for place, value in places.items():
        tensor[place] = value
    return tensor


def spikes_by_gaps(gaps_of_chunks: Sequence[Sequence[int]], chunk: int) -> Floats:
    """Chunks of zeros with entries that are the given gaps apart."""
    places = {}
    for number, gaps in enumerate(gaps_of_chunks):
        position = 0
        for order, gap in enumerate(gaps):
            position += gap
            places[number * chunk + position] = (-1.0) ** order * (1.0 + order / 8)
            position += 1
    return spikes(len(gaps_of_chunks) * chunk, places)


class Draw:
    """Random tensors from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def normal(self, *shape: int) -> Floats:
        """Standard normal numbers."""
        return self._random.standard_normal(shape).astype(np.float32)

    def coarse(self, *shape: int) -> Floats:
        """Normal numbers rounded to sixteenths: they have ties, and the file stays small."""
        return (np.round(self._random.standard_normal(shape) * 16) / 16).astype(np.float32)

    def ties(self, *shape: int) -> Floats:
        """Whole numbers from -2 to 2."""
        return self._random.integers(-2, 3, shape).astype(np.float32)

    def zeros(self, *shape: int) -> Floats:
        """Zeros of both signs."""
        return np.where(self._random.integers(0, 2, shape) == 1, np.float32(-0.0), np.float32(0.0)).astype(np.float32)

    def subnormal(self, *shape: int) -> Floats:
        """Float32 subnormals of both signs and all sizes."""
        bits = self._random.integers(0, 1 << 23, shape) >> self._random.integers(0, 23, shape)
        signed = bits + (self._random.integers(0, 2, shape) << 31)
        return signed.astype(np.uint32).view(np.float32)

    def halfway(self, *shape: int) -> Floats:
        """Numbers half-way between two bf16 numbers."""
        upper = self._random.integers(0x3F00, 0x4080, shape) + (self._random.integers(0, 2, shape) << 15)
        return ((upper << 16) + 0x8000).astype(np.uint32).view(np.float32)


def dense_cases(draw: Draw) -> list[Case]:
    """The scheme that sends everything, and tensors of other schemes that travel dense."""
    negative_zeros = np.full((3, 3), -0.0, np.float32)
    largest = bits_tensor([*special_bits(), 0x7F7FFFFF, 0xFF7FFFFF], (2, 13))
    coarse = draw.coarse(4096)
    return [
        Case("dense bf16", draw.normal(3, 5, 2), Dense("bf16"), DENSE),
        Case("dense fp32 scalar", np.array(-1.2345678, np.float32), Dense("fp32"), DENSE),
        Case("dense bf16 no elements", np.zeros((0,), np.float32), Dense("bf16"), DENSE),
        Case("dense fp32 no elements", np.zeros((0, 4), np.float32), Dense("fp32"), DENSE),
        Case("dense bf16 special values", bits_tensor(special_bits(), (4, 6)), Dense("bf16"), DENSE),
        Case("dense fp32 special values, float32 maximum", largest, Dense("fp32"), DENSE),
        Case("dense bf16 half-way", draw.halfway(64), Dense("bf16"), DENSE),
        Case("dense bf16 -0.0", negative_zeros, Dense("bf16"), DENSE),
        Case("scalar below dense_below", np.array(0.1, np.float32), TopK(1, 64, "tiles", "bf16", "auto"), DENSE),
        Case("(0,) dense_below 0", np.zeros((0,), np.float32), TopK(4, 64, "flat", "sign", "auto", 0), DENSE),
        Case("(0, 4) dense_below 0", np.zeros((0, 4), np.float32), TopK(4, 64, "tiles", "fp32", "u16", 0), DENSE),
        Case("sign, 4095 below 4096", coarse[:4095], TopK(8, 256, "flat", "sign", "gap8"), DENSE),
        Case("sign, 4096 not below 4096", coarse, TopK(8, 256, "flat", "sign", "gap8"), GAP8),
        Case("fp32, 99 below 100", draw.normal(9, 11), TopK(3, 64, "tiles", "fp32", "u8", 100), DENSE),
        Case("fp32, 100 not below 100", draw.normal(10, 10), TopK(3, 64, "tiles", "fp32", "u8", 100), U8),
    ]


def tile_cases(draw: Draw) -> list[Case]:
    """The layout "tiles": shapes, the change to flat, and index forms."""
    scalar = np.array(-0.7, np.float32)
    return [
        Case("scalar, one tile", scalar, TopK(1, 4, "tiles", "sign", "auto", 0), U8),
        Case("scalar, falls back to flat", scalar, TopK(3, 64, "tiles", "bf16", "auto", 0), U8),
        Case("2-D, big divisors, many kept", draw.normal(64, 192), TopK(64, 4096, "tiles", "bf16", "auto"), GAP8),
        Case("2-D, big divisors, few kept", draw.coarse(128, 64), TopK(5, 4096, "tiles", "fp32", "auto"), U16),
        Case("2-D, small divisors", draw.normal(34, 46), TopK(2, 16, "tiles", "fp32", "auto", 0), U8),
        Case("2-D, small divisors, falls back", draw.coarse(34, 46), TopK(9, 256, "tiles", "sign", "auto", 0), U8),
        Case("2-D, tiles not square", draw.normal(24, 50), TopK(7, 64, "tiles", "sign", "gap8", 0), GAP8),
        Case("2-D, prime, falls back", draw.normal(31, 37), TopK(11, 256, "tiles", "bf16", "auto", 0), U8),
        Case("2-D, prime, one tile", draw.normal(13, 11), TopK(10, 256, "tiles", "bf16", "u16", 0), U16),
        Case("2-D, one column", draw.normal(40, 1), TopK(2, 16, "tiles", "bf16", "u8", 0), U8),
        Case("2-D, tile of exactly chunk/4", draw.coarse(16, 592), TopK(16, 1024, "tiles", "bf16", "auto"), GAP8),
        Case("2-D, k above the tile size", draw.normal(8, 24), TopK(100, 256, "tiles", "sign", "auto", 0), U8),
        Case("2-D, k is chunk", draw.normal(16, 8), TopK(64, 64, "tiles", "bf16", "gap8", 0), GAP8),
        Case("2-D, tile sides are odd and even", draw.normal(12, 14), TopK(5, 49, "tiles", "sign", "u8", 0), U8),
        Case("4-D", draw.normal(8, 4, 3, 3), TopK(6, 64, "tiles", "bf16", "auto", 0), U8),
        Case("5-D", draw.normal(4, 2, 3, 2, 2), TopK(4, 36, "tiles", "fp32", "gap8", 0), GAP8),
        Case("5-D, falls back", draw.normal(7, 2, 3, 1, 2), TopK(40, 1024, "tiles", "sign", "auto", 0), GAP8),
        Case("1-D, even, tiles", draw.normal(24), TopK(2, 16, "tiles", "bf16", "auto", 0), U8),
        Case("1-D, even, falls back", draw.coarse(4352), TopK(5, 4096, "tiles", "bf16", "auto"), U16),
        Case("1-D, prime, tiles of 1", draw.normal(23), TopK(2, 4, "tiles", "sign", "auto", 0), U8),
        Case("1-D, prime, falls back", draw.normal(521), TopK(20, 256, "tiles", "fp32", "auto", 0), U8),
        Case("tiles, ties", draw.ties(32, 48), TopK(100, 256, "tiles", "sign", "auto", 0), U8),
        Case("tiles, zeros of both signs", draw.zeros(16, 32), TopK(9, 64, "tiles", "bf16", "auto", 0), U8),
        Case("tiles, half-way", draw.halfway(16, 16), TopK(33, 64, "tiles", "bf16", "auto", 0), U8),
    ]


def flat_cases(draw: Draw) -> list[Case]:
    """The layout "flat": the last chunk, ties and special values."""
    near = (np.float32(1) + np.arange(96, dtype=np.float32) * np.float32(2.0**-20)).astype(np.float32)
    subnormal = draw.subnormal(300)
    return [
        Case("flat, short last chunk", draw.normal(300), TopK(20, 256, "flat", "sign", "auto", 0), U8),
        Case("flat, last chunk of 3", draw.normal(5, 103), TopK(20, 256, "flat", "bf16", "gap8", 0), GAP8),
        Case("flat, last k' a whole number", draw.normal(225), TopK(28, 100, "flat", "fp32", "u16", 0), U16),
        Case("flat, shorter than a chunk", draw.normal(10, 7), TopK(300, 4096, "flat", "bf16", "auto", 0), GAP8),
        Case("flat, k is chunk", draw.normal(150), TopK(64, 64, "flat", "fp32", "auto", 0), U8),
        Case("flat, k is chunk, sign", draw.normal(3, 50), TopK(64, 64, "flat", "sign", "u16", 0), U16),
        Case("flat, k' of 1", draw.normal(4, 4, 10), TopK(1, 64, "flat", "sign", "auto", 0), U8),
        Case("flat, ties", draw.ties(700), TopK(90, 257, "flat", "bf16", "auto", 0), GAP8),
        Case("flat, zeros", np.zeros(200, np.float32), TopK(5, 64, "flat", "fp32", "auto", 0), U8),
        Case("flat, zeros of both signs, sign", draw.zeros(200), TopK(13, 64, "flat", "sign", "auto", 0), U8),
        Case("flat, zeros of both signs, fp32", draw.zeros(20, 10), TopK(13, 64, "flat", "fp32", "auto", 0), U8),
        Case("flat, subnormals, bf16", subnormal, TopK(100, 128, "flat", "bf16", "auto", 0), U8),
        Case("flat, subnormals, sign", subnormal, TopK(9, 32, "flat", "sign", "auto", 0), U8),
        Case("flat, special values", bits_tensor(special_bits(), (24,)), TopK(6, 8, "flat", "bf16", "auto", 0), U8),
        # The magnitudes differ in float32 and are equal in bf16: the selection comes before the rounding.
        Case("flat, equal only in bf16", near, TopK(5, 32, "flat", "bf16", "auto", 0), U8),
    ]


def scale_cases() -> list[Case]:
    """Scales that show how the mean is taken and rounded."""
    even, odd = float32_from_bits(0x3F808000), float32_from_bits(0xBF818000)
    constant = np.repeat(np.array([even, odd, -even, -odd], np.float32), 3)
    # One after the other, the ones are lost after the big number and count before it: the scales differ.
    big = 2.0**24 + 2.0**16
    order = np.array([big, *[1.0] * 7, *[-1.0] * 7, big, *[1.0] * 4, -big, *[1.0] * 3], np.float32)
    largest = spikes(24, {5: float(float32_from_bits(0x7F7F7FFF)), 9: -float(float32_from_bits(0x7F7E8000))})
    largest[16] = float32_from_bits(0x807FFFFF)
    return [
        Case("sign, mean half-way", constant, TopK(3, 3, "flat", "sign", "auto", 0), U8),
        Case("sign, order of the sum", order, TopK(8, 8, "flat", "sign", "auto", 0), U8),
        Case("sign, largest and subnormal scales", largest, TopK(1, 8, "flat", "sign", "auto", 0), U8),
        Case(
            "fp32, float32 maximum",
            spikes(70, {3: FLOAT32_MAX, 69: -FLOAT32_MAX}),
            TopK(2, 64, "flat", "fp32", "auto", 0),
            U8,
        ),
    ]


def index_cases() -> list[Case]:
    """Gaps around the multiples of 255, long chunks, and what "auto" chooses."""
    gaps = [254, 255, 256, 509, 510, 511]
    gap_rows = spikes_by_gaps([gaps, gaps[::-1], [0, *gaps[1:]]], 4096)
    firsts = spikes_by_gaps([[gap] for gap in [*gaps, 1023, 0]], 1024)
    # One entry a chunk. A gap of 255 to 509 takes GAP8 two bytes, as many as U16 takes.
    equal = spikes_by_gaps([[255], [509], [300]], 512)
    shorter = spikes_by_gaps([[255], [509], [254]], 512)
    longer = spikes_by_gaps([[510], [509], [300]], 512)
    mixed = spikes_by_gaps([[510], [511], [0], [254]], 512)
    ends = spikes_by_gaps([[0, 254], [0, 0], [255], [254, 0]], 256)
    last = spikes_by_gaps([[254], [255], [0]], 256)
    short = spikes_by_gaps([[0], [254], [17]], 256)
    far = spikes(32768 + 300, {32767: -2.0, 32768 + 299: 0.5})
    return [
        Case("gap8, gaps around multiples of 255", gap_rows, TopK(6, 4096, "flat", "bf16", "gap8"), GAP8),
        Case("gap8, first gaps, k' of 1", firsts, TopK(1, 1024, "flat", "sign", "gap8"), GAP8),
        Case("gap8, last index of a chunk of 32768", far, TopK(1, 32768, "flat", "bf16", "gap8"), GAP8),
        Case("u16, last index of a chunk of 32768", far, TopK(1, 32768, "flat", "fp32", "auto"), U16),
        Case("u8, last index of a chunk of 256", ends, TopK(2, 256, "flat", "fp32", "u8", 0), U8),
        Case("gap8, gap of 255 in a chunk of 256", last, TopK(1, 256, "flat", "fp32", "gap8", 0), GAP8),
        Case("auto, u16 and gap8 equally long", equal, TopK(1, 512, "flat", "bf16", "auto", 0), U16),
        Case("auto, gap8 one byte shorter", shorter, TopK(1, 512, "flat", "bf16", "auto", 0), GAP8),
        Case("auto, gap8 one byte longer", longer, TopK(1, 512, "flat", "bf16", "auto", 0), U16),
        Case("auto, equal over the whole tensor", mixed, TopK(1, 512, "flat", "bf16", "auto", 0), U16),
        Case("auto, gap8 as long as u8", short, TopK(1, 256, "flat", "bf16", "auto", 0), U8),
    ]


def all_cases() -> list[Case]:
    """Every case, in the order of the file."""
    draw = Draw(SEED)
    return [*dense_cases(draw), *tile_cases(draw), *flat_cases(draw), *scale_cases(), *index_cases()]


def as_array(data: bytes) -> NDArray[np.uint8]:
    """Bytes as the golden file holds them."""
    return np.frombuffer(data, np.uint8)


def main() -> None:
    """Encode every case, and write the file beside this script."""
    cases = all_cases()
    arrays: dict[str, NDArray[np.generic]] = {"cases": np.array(len(cases), np.int64)}
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for number, case in enumerate(cases):
            sent = encode(case.tensor, case.scheme)
            if sent.form != case.form:
                raise ValueError(f"{case.name}: form {sent.form}, and the case is there to show {case.form}")
            key = f"case{number}"
            arrays[f"{key}.name"] = as_array(case.name.encode())
            arrays[f"{key}.tensor"] = case.tensor.astype(np.float32)
            arrays[f"{key}.scheme"] = as_array(case.scheme.as_json().encode())
            arrays[f"{key}.form"] = np.array(sent.form, np.int64)
            arrays[f"{key}.values"] = as_array(sent.values)
            arrays[f"{key}.indices"] = as_array(sent.indices)
            arrays[f"{key}.scales"] = as_array(sent.scales)
    path = Path(__file__).with_name("encodings.npz")
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    print(f"{path.name}: {len(cases)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
