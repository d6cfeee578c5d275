"""An encoded tensor in pieces, cut at chunk borders (anywhere, when dense) so that each fits a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.codec import indices, values
from gradwire.codec.bounds import bounds, check_sizes, check_whole, entry_counts, form_name, units
from gradwire.codec.scheme import Encoded, Form, Scheme, TopK, value_kind
from gradwire.codec.tiles import Ints, layout_of
from gradwire.errors import ConfigError, MalformedTensor

__all__ = ["Joiner", "Piece", "cut"]


@dataclass(frozen=True)
class Piece:
    """The bytes of chunks [first, first + count) of an encoded tensor; of elements, in form DENSE."""

    form: Form
    first: int
    count: int
    values: bytes
    scales: bytes = b""
    counts: bytes = b""
    indices: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of all four fields together."""
        return len(self.values) + len(self.scales) + len(self.counts) + len(self.indices)


def cut(encoded: Encoded, *, scheme: Scheme, shape: Sequence[int], limit_bytes: int) -> Iterator[Piece]:
    """`encoded`, a valid contribution or aggregate of `shape`, in pieces of at most `limit_bytes`, in order.

    One chunk (one dense value) that is longer than the limit is a piece all the same. An empty tensor has no
    pieces.

    Raises ConfigError for a limit below 1, MalformedTensor if sizes don't match `shape`.
    """
    if limit_bytes < 1:
        raise ConfigError(f"limit_bytes = {limit_bytes}: allowed is 1 or more")
    aggregate = is_aggregate(encoded)
    check_whole(encoded, scheme, shape, aggregate=aggregate)
    kind = value_kind(scheme, encoded.form, aggregate=aggregate)
    if encoded.form is Form.DENSE or not isinstance(scheme, TopK):
        width = values.WIDTH[kind]
        return _cut_dense(encoded.values, width, max(1, limit_bytes // width))
    layout = layout_of(scheme, shape)
    entries = entry_counts(layout, encoded.counts, form=encoded.form, first=0, count=layout.chunks, aggregate=aggregate)
    index_bytes = indices.chunk_bytes(encoded.form, encoded.indices, entries, layout.lengths())
    return _cut_sparse(encoded, values.chunk_bytes(kind, entries), index_bytes, limit_bytes)


class Joiner:
    """Puts a tensor together again from its pieces, checked in full: what `finish` returns is valid."""

    def __init__(self, scheme: Scheme, shape: Sequence[int], aggregate: bool) -> None:
        self._scheme = scheme
        self._shape = tuple(int(size) for size in shape)
        self._aggregate = aggregate
        self._form: Form | None = None
        self._next = 0
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Takes the next piece; raises MalformedTensor, leaving things as they were, if it can't be that."""
        if self._form is not None and piece.form != self._form:
            form = form_name(piece.form)
            raise MalformedTensor(f"a piece in form {form} of a tensor that began in form {self._form.name}")
        if piece.first != self._next:
            raise MalformedTensor(f"a piece that begins at {piece.first}; the next one begins at {self._next}")
        limits = bounds(
            self._scheme,
            self._shape,
            form=piece.form,
            first=piece.first,
            count=piece.count,
            aggregate=self._aggregate,
            counts=piece.counts,
        )
        check_sizes(Encoded(piece.form, piece.values, piece.indices, piece.counts, piece.scales), limits)
        self._check_content(piece)
        self._form = Form(piece.form)
        self._next += piece.count
        self._pieces.append(piece)

    def finish(self) -> Encoded:
        """The whole tensor; raises MalformedTensor if pieces are missing."""
        total = units(self._scheme, self._shape, self._form)
        if self._next != total:
            raise MalformedTensor(f"the tensor ends after {self._next} of {total} chunks or dense elements")
        return Encoded(
            self._form or Form.DENSE,
            b"".join(piece.values for piece in self._pieces),
            b"".join(piece.indices for piece in self._pieces),
            b"".join(piece.counts for piece in self._pieces),
            b"".join(piece.scales for piece in self._pieces),
        )

    def _check_content(self, piece: Piece) -> None:
        form, first, count = Form(piece.form), piece.first, piece.count
        kind = value_kind(self._scheme, form, aggregate=self._aggregate)
        if form is Form.DENSE or not isinstance(self._scheme, TopK):
            values.check(piece.values, b"", kind, np.empty(0, np.int64))
            return
        layout = layout_of(self._scheme, self._shape)
        entries = entry_counts(layout, piece.counts, form=form, first=first, count=count, aggregate=self._aggregate)
        values.check(piece.values, piece.scales, kind, entries)
        if form is not Form.SIGN:
            for _ in indices.blocks(form, piece.indices, entries, layout.lengths(first, count), first=first):
                pass


def is_aggregate(encoded: Encoded) -> bool:
    """Whether `encoded` can only be an aggregate, or (DENSE) may be one."""
    return bool(encoded.counts) or encoded.form in (Form.DENSE, Form.BITMAP)


def _cut_dense(data: bytes, width: int, step: int) -> Iterator[Piece]:
    total = len(data) // width
    for first in range(0, total, step):
        count = min(step, total - first)
        yield Piece(Form.DENSE, first, count, data[first * width : (first + count) * width])


def _cut_sparse(encoded: Encoded, value_bytes: Ints, index_bytes: Ints, limit_bytes: int) -> Iterator[Piece]:
    value_at, index_at = _borders(value_bytes), _borders(index_bytes)
    count_width = 2 if encoded.counts else 0
    scale_width = values.SCALE_BYTES if encoded.scales else 0
    all_at = value_at + index_at + (count_width + scale_width) * np.arange(len(value_at))
    low = 0
    while low < len(value_bytes):
        high = int(np.searchsorted(all_at, all_at[low] + limit_bytes, side="right")) - 1
        high = max(high, low + 1)
        yield Piece(
            encoded.form,
            low,
            high - low,
            encoded.values[value_at[low] : value_at[high]],
            scales=encoded.scales[scale_width * low : scale_width * high],
            counts=encoded.counts[count_width * low : count_width * high],
            indices=encoded.indices[index_at[low] : index_at[high]],
        )
        low = high


def _borders(sizes: Ints) -> Ints:
    """Where each chunk begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
