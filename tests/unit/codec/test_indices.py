"""Indices as bytes in the four sparse forms: examples by hand, every set of indices, every kind of damage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.codec import Form, indices
from gradwire.errors import MalformedTensor

ALL_FORMS = [Form.U8, Form.U16, Form.GAP8, Form.BITMAP]


def ints(*numbers):
    return np.array(numbers, dtype=np.int64)


def reference(form, chunks, lengths):
    """The bytes by the words of DESIGN.md, one index at a time; `chunks` is a list of lists of indices."""
    out = bytearray()
    for chosen, length in zip(chunks, lengths, strict=True):
        if form is Form.BITMAP:
            bits = sum(1 << index for index in chosen)
            out += bits.to_bytes((length + 7) // 8, "little")
            continue
        previous = -1
        for index in chosen:
            if form is Form.GAP8:
                gap = index - previous - 1
                out += b"\xff" * (gap // 255) + bytes([gap % 255])
            else:
                out += index.to_bytes(1 if form is Form.U8 else 2, "little")
            previous = index
    return bytes(out)


@st.composite
def chunked(draw, longest=256):
    """(chunks, lengths): the last chunk may be shorter; each has at least one index."""
    length = draw(st.integers(1, longest))
    count = draw(st.integers(1, 6))
    lengths = [length] * (count - 1) + [draw(st.integers(1, length))]
    chunks = [sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size))) for size in lengths]
    return chunks, lengths


@pytest.mark.parametrize(
    ("form", "packed"),
    [
        # Two chunks of 600: indices 0, 2, 258 and 254, 511.
        (Form.U16, "0000 0200 0201 fe00 ff01"),
        # First chunk: gaps 0, 1, then 258 - 2 - 1 = 255 = one byte of 255 and the byte 0.
        # Second chunk starts afresh: gap 254, one byte; then 511 - 254 - 1 = 256 = 255 and 1.
        (Form.GAP8, "00 01 ff00 fe ff01"),
        # 75 bytes a chunk. Bits 0 and 2 are byte 0 = 5; bit 258 is bit 2 of byte 32 = 4.
        # Bit 254 is bit 6 of byte 31 = 0x40; bit 511 is bit 7 of byte 63 = 0x80.
        (Form.BITMAP, "05" + "00" * 31 + "04" + "00" * 42 + "00" * 31 + "40" + "00" * 31 + "80" + "00" * 11),
    ],
)
def test_bytes_by_hand(form, packed):
    chosen, counts, lengths = ints(0, 2, 258, 254, 511), ints(3, 2), ints(600, 600)
    assert indices.pack(form, chosen, counts, lengths) == bytes.fromhex(packed)
    assert indices.unpack(form, bytes.fromhex(packed), counts, lengths).tolist() == chosen.tolist()


def test_u8_bytes_by_hand():
    assert indices.pack(Form.U8, ints(0, 255, 7), ints(2, 1), ints(256, 9)) == b"\x00\xff\x07"


@settings(max_examples=300)
@given(chunked(), st.sampled_from(ALL_FORMS), st.sampled_from([1, 300, 1 << 20]))
def test_any_indices_are_packed_as_specified_and_come_back(data, form, block):
    chunks, lengths = data
    counts = ints(*map(len, chunks))
    flat = [index for chosen in chunks for index in chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "BLOCK", block)
        packed = indices.pack(form, np.array(flat, dtype=np.uint16), counts, ints(*lengths))
        assert packed == reference(form, chunks, lengths)
        assert indices.unpack(form, packed, counts, ints(*lengths)).tolist() == flat
        sizes = indices.chunk_bytes(form, packed, counts, ints(*lengths)).tolist()
    assert sizes == [len(reference(form, [each], [size])) for each, size in zip(chunks, lengths, strict=True)]
    assert len(packed) <= indices.max_bytes(form, counts, ints(*lengths))


@given(chunked(longest=2000), st.sampled_from([Form.U16, Form.GAP8, Form.BITMAP]))
def test_long_gaps_come_back(data, form):
    chunks, lengths = data
    counts = ints(*map(len, chunks))
    packed = reference(form, chunks, lengths)
    assert indices.unpack(form, packed, counts, ints(*lengths)).tolist() == [
        index for chosen in chunks for index in chosen
    ]


@pytest.mark.parametrize(
    ("form", "packed", "words"),
    [
        (Form.U8, "00 01 02", "end early, in chunk 8"),
        (Form.U16, "0000 0100 0200 03", "end early, in chunk 8"),
        (Form.GAP8, "00 00 00", "end early, in chunk 8"),
        (Form.BITMAP, "03 00", "end early, in chunk 8"),
        (Form.U8, "00 01 02 03 04", "1 bytes of indices left over after chunk 8"),
        (Form.GAP8, "00 00 00 00 00", "1 bytes of indices left over after chunk 8"),
        (Form.BITMAP, "0300 0300 00", "1 bytes of indices left over after chunk 8"),
        (Form.U8, "00 01 05 05", "chunk 8 don't ascend"),
        (Form.U8, "05 01 00 02", "chunk 7 don't ascend"),
        (Form.U16, "0000 0100 0500 0400", "chunk 8 don't ascend"),
        (Form.U8, "00 0a 00 01", "index 10 of chunk 7 is out of range"),
        (Form.U16, "0000 0100 0000 0a00", "index 10 of chunk 8 is out of range"),
        (Form.GAP8, "00 00 05 04", "index 10 of chunk 8 is out of range"),
        (Form.GAP8, "fe 00 00 00", "index 255 of chunk 7 is out of range"),
        (Form.GAP8, "ff ff ff ff", "end early, in chunk 7, or a gap leaves that chunk"),
        (Form.GAP8, "00 00 00 ff", "end early, in chunk 8"),
        (Form.BITMAP, "0300 0304", "spare bits are set in the bitmap of chunk 8"),
        (Form.BITMAP, "0700 0300", "bitmap of chunk 7 has 3 bits set; its count is 2"),
    ],
)
def test_damage_is_told_with_its_chunk(form, packed, words):
    with pytest.raises(MalformedTensor) as caught:  # two chunks of 10 with 2 indices each, numbered from 7
        indices.unpack(form, bytes.fromhex(packed), ints(2, 2), ints(10, 10), first=7)
    assert words in str(caught.value)


@given(chunked(), st.sampled_from(ALL_FORMS), st.data())
def test_any_bytes_are_malformed_or_canonical(data, form, draw):
    """Whatever unpacks is ascending and in range, and packs to the same bytes: no two encodings of one thing."""
    chunks, lengths = data
    counts = ints(*map(len, chunks))
    packed = bytearray(reference(form, chunks, lengths))
    for _ in range(draw.draw(st.integers(1, 3))):
        packed[draw.draw(st.integers(0, len(packed) - 1))] = draw.draw(st.integers(0, 255))
    packed = bytes(packed[: draw.draw(st.integers(0, len(packed)))]) + draw.draw(st.binary(max_size=2))
    try:
        found = indices.unpack(form, packed, counts, ints(*lengths))
    except MalformedTensor:
        return
    assert indices.pack(form, found, counts, ints(*lengths)) == packed
    for chosen, length in zip(np.split(found, np.cumsum(counts)[:-1]), lengths, strict=True):
        assert (np.diff(chosen) > 0).all()
        assert chosen[0] >= 0
        assert chosen[-1] < length
