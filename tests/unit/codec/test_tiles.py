"""The chunk geometry of DESIGN.md section 3."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import codec


@pytest.mark.parametrize(
    ("shape", "chunk", "tile", "chunks", "length"),
    [
        ((128, 192), 4096, (64, 64), 6, 4096),
        ((100, 64), 4096, (50, 64), 2, 3200),  # largest divisor of 100 that is at most 64
        ((96, 8, 3, 3), 4096, (48, 36), 4, 1728),  # 96 x 72: the divisors 48 and 36
        ((4, 4), 16, (4, 4), 1, 16),
        ((8,), 16, (1, 4), 2, 4),  # a vector: rows of 4, which are chunk / 4
        ((), 1, (1, 1), 1, 1),
    ],
)
def test_tiles_have_the_largest_sides_that_divide_and_fit(shape, chunk, tile, chunks, length):
    layout = codec.layout_of(codec.TopK(k=1, chunk=chunk), shape)
    assert (layout.tile, layout.chunks, layout.length) == (tile, chunks, length)
    assert list(layout.lengths()) == [length] * chunks


@pytest.mark.parametrize("shape", [(67, 71), (4097,), (1, 8192), (9973,), ()])
def test_small_tiles_fall_back_to_flat(shape):
    layout = codec.layout_of(codec.TopK(k=64, chunk=4096), shape)
    assert layout.tile is None
    assert sum(layout.lengths()) == math.prod(shape)


def test_tiles_keep_k_or_the_whole_of_a_smaller_tile():
    layout = codec.layout_of(codec.TopK(k=4000, chunk=4096), (100, 64))
    assert list(layout.kept_counts()) == [3200, 3200]


@pytest.mark.parametrize(
    ("numel", "lengths", "kept"),
    [
        (20, [8, 8, 4], [3, 3, 2]),  # ceil(3 * 4 / 8) = 2
        (17, [8, 8, 1], [3, 3, 1]),  # ceil(3 / 8) = 1
        (16, [8, 8], [3, 3]),
        (7, [7], [3]),  # ceil(21 / 8) = 3
        (0, [], []),
    ],
)
def test_flat_keeps_its_share_of_a_shorter_last_chunk(numel, lengths, kept):
    layout = codec.layout_of(codec.TopK(k=3, chunk=8, layout="flat"), (numel,))
    assert (list(layout.lengths()), list(layout.kept_counts())) == (lengths, kept)


def test_tiles_are_sent_row_by_row_and_each_row_by_row():
    layout = codec.layout_of(codec.TopK(k=1, chunk=4), (4, 4))
    chunks = layout.to_chunks(torch.arange(16).view(4, 4))
    assert chunks.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@given(
    shape=st.lists(st.integers(1, 12), max_size=5),
    side=st.integers(1, 8),
    layout=st.sampled_from(["tiles", "flat"]),
)
def test_from_chunks_undoes_to_chunks(shape, side, layout):
    geometry = codec.layout_of(codec.TopK(k=1, chunk=side * side, layout=layout), shape)
    tensor = torch.arange(math.prod(shape)).view(shape)
    flat = geometry.to_chunks(tensor)
    assert flat.is_contiguous()
    assert sorted(flat.tolist()) == list(range(math.prod(shape)))
    assert torch.equal(geometry.from_chunks(flat), tensor)
    assert int(geometry.lengths().sum()) == geometry.numel == math.prod(shape)
