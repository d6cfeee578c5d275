"""Chunk-relative indices as bytes, in the four sparse forms, and back.

Everywhere here: `indices` are relative to their chunk and ascending within it, chunk after chunk in one 1-D
array; `counts` (int64, each at least 1) says how many each chunk has, `lengths` (int64) out of how many
coefficients; only the last length may differ from the others. Work goes in blocks of chunks that fit the
cache, and what is unpacked are places in the block: index + number of the chunk in the block * length of its chunks.
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
Places = npt.NDArray[np.int32]

BLOCK: Final = 1 << 20  # coefficients whose chunks are unpacked at once, 4 MiB as float32
ESCAPE: Final = 255  # GAP8: this byte adds 255 to the gap and the gap goes on
_WIDTH: Final = {Form.U8: 1, Form.U16: 2, Form.SIGN: 0}


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
    found = [np.empty(0, np.int64)]
    blocks_of_places = blocks(form, data, counts, lengths, first=first)
    for places, (low, high) in zip(blocks_of_places, spans(lengths), strict=True):
        found.append(places - chunk_starts(counts[low:high], int(lengths[low])))
    return np.concatenate(found)


def blocks(form: Form, data: bytes, counts: Ints, lengths: Ints, *, first: int = 0) -> Iterator[Places]:
    """The places in each of the blocks `spans(lengths)` in turn, int32, ascending, checked in full.

    Raises MalformedTensor, with the number of the chunk (`first` is the number of counts[0]), where there
    are too few or too many bytes, indices that don't ascend or leave their chunk, or spare bits that are set.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    offset = 0
    for low, high in spans(lengths):
        window = raw[offset : offset + int(max_bytes(form, counts[low:high], lengths[low:high]))]
        places, used = _UNPACK[form](window, counts[low:high], int(lengths[low]), first + low)
        offset += used
        yield places
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
    long = np.flatnonzero(gaps >= ESCAPE)
    if not long.size:
        return gaps.astype(np.uint8)
    escapes = gaps[long] // ESCAPE
    gaps[long] -= ESCAPE * escapes
    closes = np.ones(gaps.size + int(escapes.sum()), dtype=np.bool_)
    closes[np.repeat(long, escapes) + np.arange(int(escapes.sum()))] = False
    packed = np.full(closes.size, ESCAPE, dtype=np.uint8)
    packed[closes] = gaps
    return packed


def _pack_bitmap(indices: npt.NDArray[Any], counts: Ints, length: int) -> Bytes:
    bits = np.zeros((len(counts), length), dtype=np.bool_)
    bits.reshape(-1)[indices.astype(np.int64) + chunk_starts(counts, length)] = True
    return np.packbits(bits, axis=1, bitorder="little")


def chunk_starts(counts: Ints, length: int) -> Ints:
    """For each index, the position at which its chunk starts, counted from the first chunk, int64."""
    return np.repeat(np.arange(len(counts), dtype=np.int64) * length, counts)


def _unpack_u8(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Places, int]:
    return _unpack_fixed(window, 1, counts, length, first)


def _unpack_u16(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Places, int]:
    return _unpack_fixed(window, 2, counts, length, first)


def _unpack_fixed(window: Bytes, width: int, counts: Ints, length: int, first: int) -> tuple[Places, int]:
    total = int(counts.sum())
    if window.size < total * width:
        _ends_early(counts, window.size // width, first)
    indices = window.view(f"<u{width}").astype(np.int32)
    ends = np.cumsum(counts)
    steps = indices[1:] - indices[:-1]
    steps[ends[:-1] - 1] = 1
    if (steps <= 0).any():
        where = int(np.searchsorted(ends, int(np.argmax(steps <= 0)) + 1, side="right"))
        raise MalformedTensor(f"the indices of chunk {first + where} don't ascend")
    _check_range(indices[ends - 1], length, first)
    return _shifted(indices, counts, np.arange(len(counts)) * length), total * width


def _unpack_gap8(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Places, int]:
    ends = np.cumsum(counts)
    total = int(ends[-1])
    closes = window != ESCAPE
    escapes = np.flatnonzero(~closes)
    owners = escapes - np.arange(escapes.size)  # the entry whose gap each of them belongs to
    gaps = window[closes][:total].astype(np.int32)
    owners = owners[: np.searchsorted(owners, gaps.size)]
    np.add.at(gaps, owners, np.int32(ESCAPE))  # its own type, or numpy takes ten times as long
    if gaps.size < total:
        complete = int(np.searchsorted(ends, gaps.size, side="right"))
        if complete:  # a gap that leaves an earlier chunk has eaten the bytes of the last
            _places_from_gaps(gaps[: ends[complete - 1]], counts[:complete], ends[:complete], length, first)
        _ends_early(counts, gaps.size, first)
    return _places_from_gaps(gaps, counts, ends, length, first), total + owners.size


def _places_from_gaps(gaps: Places, counts: Ints, ends: Ints, length: int, first: int) -> Places:
    gaps += 1
    sums = np.cumsum(gaps, out=gaps)
    before = np.zeros(len(counts), dtype=np.int64)
    before[1:] = sums[ends[:-1] - 1]
    _check_range(sums[ends - 1] - before - 1, length, first)
    return _shifted(sums, counts, np.arange(len(counts)) * length - before - 1)


def _shifted(numbers: Places, counts: Ints, shifts: Ints) -> Places:
    """`numbers` of chunks that have `counts` each, plus the shift of their chunk; in place."""
    if (counts == counts[0]).all():
        rows = numbers.reshape(len(counts), -1)
        rows += shifts.astype(np.int32)[:, None]
    else:
        numbers += np.repeat(shifts.astype(np.int32), counts)
    return numbers


def _unpack_bitmap(window: Bytes, counts: Ints, length: int, first: int) -> tuple[Places, int]:
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
    return np.flatnonzero(bits[:, :length]).astype(np.int32), int(window.size)


_UNPACK: Final = {
    Form.U8: _unpack_u8,
    Form.U16: _unpack_u16,
    Form.GAP8: _unpack_gap8,
    Form.BITMAP: _unpack_bitmap,
}


def _ends_early(counts: Ints, entries: int, first: int) -> NoReturn:
    where = int(np.searchsorted(np.cumsum(counts), entries, side="right"))
    raise MalformedTensor(f"the indices end early, in chunk {first + where}, or a gap leaves that chunk")


def _check_range(last: npt.NDArray[Any], length: int, first: int) -> None:
    """`last` is the highest index of each chunk."""
    if (last >= length).any():
        where = int(np.argmax(last >= length))
        raise MalformedTensor(f"index {last[where]} of chunk {first + where} is out of range: it has {length}")
