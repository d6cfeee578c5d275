"""Packing is lossless, and unpacking never believes a frame."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import MalformedTensor
from gradwire.wire.packing import from_planes, pack, planes, unpack

BOMB = 64 << 20


def frame_of(data: bytes, *, claims: int) -> bytes:
    """A zstd frame of `data` whose header says it holds `claims` bytes."""
    honest = zstandard.ZstdCompressor(level=3).compress(data)
    assert honest[4] >> 6 == 2  # the content size takes four bytes
    at = 5 if honest[4] & 0b0010_0000 else 6  # behind magic number, descriptor, and a window byte where there is one
    assert struct.unpack_from("<I", honest, at) == (len(data),)
    return honest[:at] + struct.pack("<I", claims) + honest[at + 4 :]


@pytest.fixture(scope="module")
def bomb():
    """64 MiB of zeros in a few KiB, with a true header."""
    frame = zstandard.ZstdCompressor(level=3).compress(bytes(BOMB))
    assert len(frame) < 1 << 14
    return frame


@given(st.binary(min_size=1, max_size=4096))
def test_what_is_packed_unpacks_to_the_same_bytes(data):
    frame = pack(data)
    assert unpack(frame, at_most=len(data)) == data
    assert zstandard.get_frame_parameters(frame).content_size == len(data)
    assert zstandard.ZstdDecompressor().decompress(frame) == data


def test_packing_is_the_same_every_time():
    data = np.arange(10_000, dtype=np.uint16).tobytes()
    assert pack(data) == pack(data)


@given(st.binary(min_size=1, max_size=300))
def test_a_frame_of_more_than_allowed_is_refused(data):
    with pytest.raises(MalformedTensor, match=f"claims {len(data)} bytes where at most {len(data) - 1} can be"):
        unpack(pack(data), at_most=len(data) - 1)


@given(st.binary(max_size=64))
def test_bytes_that_are_no_frame_are_refused(data):
    with pytest.raises(MalformedTensor):
        unpack(data, at_most=1 << 20)


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_a_truncated_frame_is_refused(data, draw):
    frame = pack(data)
    with pytest.raises(MalformedTensor):
        unpack(frame[: draw.draw(st.integers(0, len(frame) - 1))], at_most=len(data))


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_flipped_bit_gives_bytes_within_the_bound_or_a_refusal(data, draw):
    frame = bytearray(pack(data))
    bit = draw.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    try:
        content = unpack(bytes(frame), at_most=len(data))
    except MalformedTensor:
        return
    assert len(content) <= len(data)


def test_bytes_behind_a_frame_are_refused():
    with pytest.raises(MalformedTensor):
        unpack(pack(b"abc") + b"x", at_most=100)
    with pytest.raises(MalformedTensor):
        unpack(pack(b"abc") + pack(b"def"), at_most=100)


def test_a_frame_of_nothing_is_refused():
    with pytest.raises(MalformedTensor):  # what is empty travels as no bytes at all
        unpack(pack(b""), at_most=100)


def test_bytes_behind_an_empty_frame_are_refused():
    with pytest.raises(MalformedTensor):
        unpack(pack(b"") + b"x" * 1000, at_most=100)


def test_a_frame_that_does_not_say_its_size_is_refused():
    frame = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(b"abc" * 100)
    with pytest.raises(MalformedTensor):
        unpack(frame, at_most=1 << 20)


def test_a_frame_that_is_to_be_skipped_is_refused():
    with pytest.raises(MalformedTensor):
        unpack(struct.pack("<II", 0x184D2A50, 5) + b"hello", at_most=100)


def test_a_bomb_is_refused_without_being_unpacked(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(MalformedTensor, match=f"claims {BOMB} bytes where at most 524288 can be"):
            unpack(bomb, at_most=512 * 1024)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("claims", [1, 1000, 512 * 1024])
def test_a_bomb_that_claims_to_be_small_is_refused_without_being_unpacked(claims):
    frame = frame_of(bytes(BOMB), claims=claims)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedTensor):
            unpack(frame, at_most=512 * 1024)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_a_bomb_that_claims_to_be_empty_is_refused():
    with pytest.raises(MalformedTensor):
        unpack(frame_of(bytes(BOMB), claims=0), at_most=512 * 1024)


def test_a_frame_that_claims_more_than_it_holds_is_refused():
    with pytest.raises(MalformedTensor):
        unpack(frame_of(bytes(100_000), claims=100_001), at_most=200_000)


def test_a_refusal_leaves_the_next_frame_readable(bomb):
    for broken in (bomb, pack(b"hello")[:-1], b"", frame_of(bytes(100_000), claims=5)):
        with pytest.raises(MalformedTensor):
            unpack(broken, at_most=1000)
        assert unpack(pack(b"still here"), at_most=10) == b"still here"


@given(st.sampled_from([2, 4]), st.integers(0, 50), st.randoms(use_true_random=False))
def test_planes_are_the_bytes_of_each_significance(width, count, random):
    data = random.randbytes(width * count)
    split = planes(data, width)
    assert split == [data[plane::width] for plane in range(width)]
    assert all(isinstance(plane, bytes) for plane in split)
    assert from_planes(split) == data


def test_the_least_significant_plane_comes_first():
    values = np.array([0x0102, 0x0304], dtype="<u2")
    assert planes(values.tobytes(), 2) == [b"\x02\x04", b"\x01\x03"]
