"""Chunk-relative indices as bytes, in the four sparse forms, and back.

Everywhere here: `indices` are relative to their chunk and ascending within it, chunk after chunk in one 1-D
array; `counts` (int64, each at least 1) says how many each chunk has, `lengths` (int64) out of how many
coefficients; only the last length may differ from the others. Work goes in blocks of chunks that fit the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from gradwire.codec.scheme import Form
from gradwire.codec.tiles import Ints
from gradwire.errors import MalformedTensor

Bytes = npt.NDArray[np.uint8]

BLOCK: Final = 1 << 19  # coefficients whose chunks are unpacked at once, 2 MiB as float32
ESCAPE: Final = 255  # GAP8: this byte adds 255 to the gap and the gap goes on
_WIDTH: Final = {Form.U8: 1, Form.U16: 2}


def pack(form: Form, indices: npt.NDArray[Any], counts: Ints, lengths: Ints) -> bytes:
    """The bytes of `indices` (any integer dtype) in a sparse `form`; U8 needs chunks of at most 256."""
    if form in _WIDTH:
        return indices.astype(f"<u{_WIDTH[form]}").tobytes()
    pack_block = _pack_gap8 if form is Form.GAP8 else _pack_bitmap
    packed, begin = [], 0
    for low, high in spans(lengths):
        end = begin + int(counts[low:high].sum())
        packed.append(pack_block(indices[begin:end], counts[low:high], int(lengths[low])).tobytes())
        begin = end
    return b"".join(packed)


def unpack(form: Form, data: bytes, counts: Ints, lengths: Ints, *, first: int = 0) -> Ints:
    """All the indices in `data`, int64. Raises MalformedTensor as `blocks` does."""
    return np.concatenate([np.empty(0, np.int64), *blocks(form, data, counts, lengths, first=first)])


def blocks(form: Form, data: bytes, counts: Ints, lengths: Ints, *, first: int = 0) -> Iterator[Ints]:
    """The indices of each of `spans(lengths)` in turn, int64, checked in full.

    Raises MalformedTensor, with the number of the chunk (`first` is the number of counts[0]), where there
    are too few or too many bytes, indices that don't ascend or leave their chunk, or spare bits that are set.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    offset = 0
    for low, high in spans(lengths):
        window = raw[offset : offset + int(max_bytes(form, counts[low:high], lengths[low:high]))]
        indices, used = _UNPACK[form](window, counts[low:high], int(lengths[low]), first + low)
        offset += used
        yield indices
    if offset != raw.size:
        raise MalformedTensor(f"{raw.size - offset} bytes of indices left over after chunk {first + len(counts) - 1}")


def spans(lengths: Ints) -> Iterator[tuple[int, int]]:
    """Half-open ranges of chunks, each of one length and at most `BLOCK` coefficients (or one chunk)."""
    if not len(lengths):
        return
    whole = len(lengths) - int(lengths[-1] != lengths[0])
    step = max(1, BLOCK // int(lengths[0]))
    for low in range(0, whole, step):
        yield low, min(low + step, whole)
    if whole < len(lengths):
        yield whole, len(lengths)


def chunk_bytes(form: Form, data: bytes, counts: Ints, lengths: Ints) -> Ints:
    """How many bytes of valid `data` belong to each chunk, int64."""
    if form is not Form.GAP8:
        return _fixed_bytes(form, counts, lengths)
    raw, offset, sizes = np.frombuffer(data, dtype=np.uint8), 0, []
    for low, high in spans(lengths):
        window = raw[offset : offset + int(max_bytes(form, counts[low:high], lengths[low:high]))]
        ends = np.flatnonzero(window != ESCAPE)[np.cumsum(counts[low:high]) - 1] + 1
        sizes.append(np.diff(ends, prepend=0))
        offset += int(ends[-1])
    return np.concatenate([np.empty(0, np.int64), *sizes])


def max_bytes(form: Form, counts: Ints, lengths: Ints) -> int:
    """The most bytes that `counts` indices can take; exact but for GAP8."""
    if form is Form.GAP8:
        return int((counts + (lengths - counts) // ESCAPE).sum())
    return int(_fixed_bytes(form, counts, lengths).sum())


def _fixed_bytes(form: Form, counts: Ints, lengths: Ints) -> Ints:
    return (lengths + 7) // 8 if form is Form.BITMAP else counts * _WIDTH[form]


def _pack_gap8(indices: npt.NDArray[Any], counts: Ints, length: int) -> Bytes:
    gaps = indices.astype(np.int32)
    starts = np.cumsum(counts) - counts
    firsts = gaps[starts]
    gaps[1:] -= gaps[:-1] + 1
    gaps[starts] = firsts
    escapes = gaps // ESCAPE
    if not escapes.any():
        return gaps.astype(np.uint8)
    packed = np.full(gaps.size + int(escapes.sum()), ESCAPE, dtype=np.uint8)
    packed[np.arange(gaps.size) + np.cumsum(escapes)] = gaps - ESCAPE * escapes
    return packed


def _pack_bitmap(indices: npt.NDArray[Any], counts: Ints, length: int) -> Bytes:
    bits = np.zeros((len(counts), length), dtype=np.bool_)
    bits.reshape(-1)[indices.astype(np.int64) + chunk_starts(counts, length)] = True
    return np.packbits(bits, axis=1, bitorder="little")


def chunk_starts(counts: Ints, length: int) -> Ints:
    """For each index, the position at which its chunk starts, counted from the first chunk, int64."""
    return np.repeat(np.arange(len(counts), dtype=np.int64) * length, counts)


def _unpack_u8(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Ints, int]:
    return _unpack_fixed(window, 1, counts, length, first)


def _unpack_u16(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Ints, int]:
    return _unpack_fixed(window, 2, counts, length, first)


def _unpack_fixed(window: Bytes, width: int, counts: Ints, length: int, first: int) -> tuple[Ints, int]:
    total = int(counts.sum())
    if window.size < total * width:
        _ends_early(counts, window.size // width, first)
    indices = window.view(f"<u{width}").astype(np.int64)
    ends = np.cumsum(counts)
    steps = indices[1:] - indices[:-1]
    steps[ends[:-1] - 1] = 1
    if (steps <= 0).any():
        where = int(np.searchsorted(ends, int(np.argmax(steps <= 0)) + 1, side="right"))
        raise MalformedTensor(f"the indices of chunk {first + where} don't ascend")
    _check_range(indices[ends - 1], length, first)
    return indices, total * width


def _unpack_gap8(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Ints, int]:
    ends = np.cumsum(counts)
    total = int(ends[-1])
    closing = np.flatnonzero(window != ESCAPE)[:total]
    if closing.size < total:
        complete = int(np.searchsorted(ends, closing.size, side="right"))
        if complete:  # a gap that leaves an earlier chunk has eaten the bytes of the last
            entries = int(ends[complete - 1])
            _indices_from_gaps(window, closing[:entries], counts[:complete], ends[:complete], length, first)
        _ends_early(counts, closing.size, first)
    return _indices_from_gaps(window, closing, counts, ends, length, first), int(closing[-1]) + 1


def _indices_from_gaps(window: Bytes, closing: Ints, counts: Ints, ends: Ints, length: int, first: int) -> Ints:
    """`closing` are the places of the bytes that end a gap; all bytes between are escapes."""
    indices = window[closing].astype(np.int64)
    if int(closing[-1]) + 1 != closing.size:
        escapes = closing[1:] - closing[:-1]
        escapes -= 1
        escapes *= ESCAPE
        indices[1:] += escapes
        indices[0] += ESCAPE * closing[0]
    indices += 1
    np.cumsum(indices, out=indices)
    before = np.zeros(len(counts), dtype=np.int64)
    before[1:] = indices[ends[:-1] - 1]
    indices -= np.repeat(before + 1, counts)
    _check_range(indices[ends - 1], length, first)
    return indices


def _unpack_bitmap(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Ints, int]:
    width = (length + 7) // 8
    if window.size < width * len(counts):
        raise MalformedTensor(f"the indices end early, in chunk {first + window.size // width}")
    bits = np.unpackbits(window.reshape(len(counts), width), axis=1, bitorder="little").view(np.bool_)
    if bits[:, length:].any():
        where = int(np.argmax(bits[:, length:].any(axis=1)))
        raise MalformedTensor(f"spare bits are set in the bitmap of chunk {first + where}")
    found = np.count_nonzero(bits, axis=1)
    if (found != counts).any():
        where = int(np.argmax(found != counts))
        raise MalformedTensor(
            f"the bitmap of chunk {first + where} has {found[where]} bits set; its count is {counts[where]}"
        )
    return np.flatnonzero(bits) - chunk_starts(counts, width * 8), int(window.size)


_UNPACK: Final = {
    Form.U8: _unpack_u8,
    Form.U16: _unpack_u16,
    Form.GAP8: _unpack_gap8,
    Form.BITMAP: _unpack_bitmap,
}


def _ends_early(counts: Ints, entries: int, first: int) -> NoReturn:
    where = int(np.searchsorted(np.cumsum(counts), entries, side="right"))
    raise MalformedTensor(f"the indices end early, in chunk {first + where}, or a gap leaves that chunk")


def _check_range(last: Ints, length: int, first: int) -> None:
    """`last` is the highest index of each chunk."""
    if (last >= length).any():
        where = int(np.argmax(last >= length))
        raise MalformedTensor(f"index {last[where]} of chunk {first + where} is out of range: it has {length}")
