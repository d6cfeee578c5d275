"""The chunk geometry: which coefficients are ranked against each other, and in which order chunks travel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gradwire.codec.scheme import TopK

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How a tensor of `shape` falls into chunks: all of `length` coefficients, the last one of `last_length`.

    kept, last_kept: entries kept of each chunk, and of the last one.
    tile: (rows, columns) of a tile of the 2-D view `rows` x `cols`; None where chunks are runs of the flat
    tensor.
    """

    shape: tuple[int, ...]
    chunks: int
    length: int
    last_length: int
    kept: int
    last_kept: int
    rows: int
    cols: int
    tile: tuple[int, int] | None

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def tile_or_row(self) -> tuple[int, int]:
        """(rows, columns) of the matrix that a chunk is; a run of the flat tensor is one row."""
        return self.tile or (1, self.length)

    def lengths(self, first: int = 0, count: int | None = None) -> Ints:
        """Coefficients in each of chunks [first, first + count), int64; all from `first` without `count`."""
        return self._per_chunk(self.length, self.last_length, first, count)

    def kept_counts(self, first: int = 0, count: int | None = None) -> Ints:
        """Entries that a contribution keeps of each of the chunks [first, first + count), int64."""
        return self._per_chunk(self.kept, self.last_kept, first, count)

    def to_chunks(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` (of `shape`, any strides) as one contiguous 1-D tensor in chunk order, on its own device.

        Chunk c starts at c * length. May share memory with `tensor`.
        """
        if self.tile is None:
            return tensor.contiguous().view(-1)
        (high, wide), (down, across) = self.tile, self._grid
        tiles = tensor.contiguous().view(down, high, across, wide)
        return tiles.permute(0, 2, 1, 3).contiguous().view(-1)

    def from_chunks(self, flat: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_chunks`: a contiguous tensor of `shape` from a contiguous 1-D one."""
        if self.tile is None:
            return flat.view(self.shape)
        (high, wide), (down, across) = self.tile, self._grid
        tiles = flat.view(down, across, high, wide)
        return tiles.permute(0, 2, 1, 3).contiguous().view(self.shape)

    @property
    def _grid(self) -> tuple[int, int]:
        high, wide = self.tile or (1, 1)
        return self.rows // high, self.cols // wide

    def _per_chunk(self, each: int, last: int, first: int, count: int | None) -> Ints:
        count = self.chunks - first if count is None else count
        numbers = np.full(count, each, dtype=np.int64)
        if count and first + count == self.chunks:
            numbers[-1] = last
        return numbers


def layout_of(scheme: TopK, shape: Sequence[int]) -> Layout:
    """The layout of a tensor of `shape` under `scheme`; a tensor of no elements has no chunks."""
    return _layout_of(scheme, tuple(int(size) for size in shape))


@functools.lru_cache(maxsize=4096)
def _layout_of(scheme: TopK, shape: tuple[int, ...]) -> Layout:
    numel = math.prod(shape)
    if scheme.layout == "tiles" and numel:
        rows, cols = _as_matrix(shape)
        side = math.isqrt(scheme.chunk)
        tile = _largest_divisor(rows, side), _largest_divisor(cols, side)
        size = tile[0] * tile[1]
        if 4 * size >= scheme.chunk or scheme.transform is not None:
            kept = min(scheme.k, size)
            return Layout(shape, numel // size, size, size, kept, kept, rows, cols, tile)
    chunks = -(-numel // scheme.chunk)
    last = numel - (chunks - 1) * scheme.chunk if chunks else 0
    last_kept = -(-scheme.k * last // scheme.chunk)
    return Layout(shape, chunks, scheme.chunk, last, scheme.k, last_kept, 1, numel, None)


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The 2-D view in which tiles are cut: first x all the others; a vector is one row, a scalar 1 x 1."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def _largest_divisor(number: int, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
