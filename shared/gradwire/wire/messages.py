"""Encoded tensors as a stream of parts, and back.

A stream is the parts of all tensors in manifest order and a commit that says how many parts and bytes there were,
with a CRC-32 over the unpacked bytes. The receiver believes nothing: every size is checked against the manifest
before anything is unpacked, every part against its place, every value and index against its bounds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gradwire.codec import Encoded, Form, Joiner, Piece, bounds, cut, is_aggregate
from gradwire.codec.scheme import value_kind
from gradwire.codec.values import WIDTH
from gradwire.errors import MalformedTensor
from gradwire.manifest import Entry, Manifest
from gradwire.v1 import tensors_pb2 as pb
from gradwire.wire.channel import PAYLOAD_BYTES
from gradwire.wire.packing import from_planes, pack, planes, unpack

MAX_UNITS: Final = PAYLOAD_BYTES // 2  # chunks or elements of a part: each takes two bytes at least

# None stands for a tensor without a gradient, which is not the same as zeros.
Tensors = Sequence[Encoded | None]


@dataclass
class Tally:
    """What went over a stream so far."""

    parts: int = 0
    payload_bytes: int = 0
    crc32: int = 0
    wire_bytes: int = 0  # as packed

    def add(self, piece: Piece, message: pb.Part) -> None:
        """Counts one part."""
        self.parts += 1
        for field in (piece.values, piece.scales, piece.counts, piece.indices):
            self.payload_bytes += len(field)
            self.crc32 = zlib.crc32(field, self.crc32)
        self.wire_bytes += sum(map(len, (*message.values, message.scales, message.counts, message.indices)))

    def commit(self) -> pb.Commit:
        """The message that ends the stream."""
        return pb.Commit(parts=self.parts, payload_bytes=self.payload_bytes, crc32=self.crc32)


def write_parts(manifest: Manifest, tensors: Tensors, tally: Tally, *, packed: bool = True) -> Iterator[pb.Part]:
    """The parts of `tensors`, one for each entry of the manifest; `tally` counts them along."""
    for number, (entry, encoded) in enumerate(zip(manifest, tensors, strict=True)):
        if encoded is None:
            continue
        width = _width(entry, encoded.form, aggregate=is_aggregate(encoded))
        for piece in cut(encoded, scheme=entry.scheme, shape=entry.shape, limit_bytes=PAYLOAD_BYTES):
            message = _to_message(number, piece, width, packed=packed)
            tally.add(piece, message)
            yield message


def absent_positions(tensors: Tensors) -> list[int]:
    """Positions of the tensors that have no gradient, ascending."""
    return [number for number, encoded in enumerate(tensors) if encoded is None]


class PartReader:
    """Takes the parts of one stream as they arrive, and checks them.

    aggregate: whether the stream is an aggregate; contributions have other forms and no counts.
    Raises MalformedTensor, naming the tensor, at the first thing that is wrong.
    """

    def __init__(self, manifest: Manifest, *, absent: Iterable[int], aggregate: bool) -> None:
        self.tally = Tally()
        self._manifest = manifest
        self._aggregate = aggregate
        self._tensors: list[Encoded | None] = [None] * len(manifest)
        self._absent = _checked_absent(absent, len(manifest))
        # Empty tensors travel as nothing, so no part of theirs is waited for.
        self._pending = [n for n, entry in enumerate(manifest) if n not in self._absent and entry.elements]
        for number, entry in enumerate(manifest):
            if number not in self._absent and not entry.elements:
                self._tensors[number] = Encoded(Form.DENSE, b"")
        self._next = 0
        self._joiner: Joiner | None = None

    def add(self, message: pb.Part) -> None:
        """Takes the next part."""
        number = message.tensor
        if number >= len(self._manifest):
            raise MalformedTensor(f"a part is of tensor {number}, and the manifest has {len(self._manifest)}")
        entry = self._manifest.entries[number]
        if self._joiner is not None and number != self._pending[self._next]:
            self._finish_tensor()
        try:
            self._add(number, entry, message)
        except MalformedTensor as error:
            raise MalformedTensor(f"{entry.name}: {error}") from error

    def _add(self, number: int, entry: Entry, message: pb.Part) -> None:
        if self._next == len(self._pending) or number != self._pending[self._next]:
            raise MalformedTensor("a part out of order: tensors come once each, in manifest order, none left out")
        if self._joiner is None:
            self._joiner = Joiner(entry.scheme, entry.shape, aggregate=self._aggregate)
        piece = _to_piece(entry, message, aggregate=self._aggregate)
        self._joiner.add(piece)
        self.tally.add(piece, message)

    def finish(self, commit: pb.Commit) -> list[Encoded | None]:
        """All tensors, once the commit has come. Raises MalformedTensor unless it fits what came before it."""
        if self._joiner is not None:
            self._finish_tensor()
        if self._next < len(self._pending):
            raise MalformedTensor(f"the commit came before {self._manifest.entries[self._pending[self._next]].name}")
        for name, said, seen in (
            ("parts", commit.parts, self.tally.parts),
            ("payload_bytes", commit.payload_bytes, self.tally.payload_bytes),
            ("crc32", commit.crc32, self.tally.crc32),
        ):
            if said != seen:
                raise MalformedTensor(f"the commit says {name} = {said}, but what arrived has {seen}")
        return self._tensors

    def _finish_tensor(self) -> None:
        number = self._pending[self._next]
        if self._joiner is not None:
            try:
                self._tensors[number] = self._joiner.finish()
            except MalformedTensor as error:
                raise MalformedTensor(f"{self._manifest.entries[number].name}: {error}") from error
        self._joiner = None
        self._next += 1


def _checked_absent(absent: Iterable[int], count: int) -> frozenset[int]:
    numbers = list(absent)
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= count):
        raise MalformedTensor("the list of tensors without a gradient is not ascending, or longer than the manifest")
    return frozenset(numbers)


def _width(entry: Entry, form: Form, *, aggregate: bool) -> int:
    """Byte planes of the values; signs are one."""
    return WIDTH.get(value_kind(entry.scheme, form, aggregate=aggregate), 1)


def _to_message(tensor: int, piece: Piece, width: int, *, packed: bool) -> pb.Part:
    packing, values = pb.PACKING_NONE, [piece.values]
    scales, counts, indices = piece.scales, piece.counts, piece.indices
    if packed:
        frames = [_packed(plane) for plane in planes(piece.values, width)]
        fields = _packed(piece.scales), _packed(piece.counts), _packed(piece.indices)
        if sum(map(len, (*frames, *fields))) < piece.nbytes:
            packing, values, (scales, counts, indices) = pb.PACKING_ZSTD, frames, fields
    return pb.Part(
        tensor=tensor,
        form=pb.Form.ValueType(piece.form),
        first=piece.first,
        count=piece.count,
        packing=packing,
        values=values,
        scales=scales,
        counts=counts,
        indices=indices,
    )


def _packed(data: bytes) -> bytes:
    return pack(data) if data else b""


def _to_piece(entry: Entry, message: pb.Part, *, aggregate: bool) -> Piece:
    try:
        form = Form(message.form)
    except ValueError:
        raise MalformedTensor(f"form {message.form} is unknown") from None
    packed = message.packing == pb.PACKING_ZSTD
    if not packed and message.packing != pb.PACKING_NONE:
        raise MalformedTensor(f"packing {message.packing} is unknown")
    if message.count > MAX_UNITS:
        raise MalformedTensor(f"a part of {message.count} chunks or elements is over the {PAYLOAD_BYTES} bytes allowed")
    counts = _field(message.counts, packed=packed, at_most=PAYLOAD_BYTES)
    limit = bounds(
        entry.scheme,
        entry.shape,
        form=form,
        first=message.first,
        count=message.count,
        aggregate=aggregate,
        counts=counts,
    )
    if limit.values_bytes > PAYLOAD_BYTES:
        raise MalformedTensor(f"a part of {limit.values_bytes} bytes of values is over the {PAYLOAD_BYTES} allowed")
    indices = _field(message.indices, packed=packed, at_most=min(limit.indices_bytes, PAYLOAD_BYTES))
    scales = _field(message.scales, packed=packed, at_most=limit.scales_bytes)
    width = _width(entry, form, aggregate=aggregate)
    data = _values(list(message.values), width, limit.values_bytes, packed=packed)
    piece = Piece(form, message.first, message.count, data, scales, counts, indices)
    if piece.nbytes > PAYLOAD_BYTES:
        raise MalformedTensor(f"a part is over the {PAYLOAD_BYTES} bytes of payload allowed")
    return piece


def _field(data: bytes, *, packed: bool, at_most: int) -> bytes:
    if packed and data:
        return unpack(data, at_most=at_most)
    if len(data) > at_most:
        raise MalformedTensor(f"a field has {len(data)} bytes where at most {at_most} can be")
    return data


def _values(fields: list[bytes], width: int, size: int, *, packed: bool) -> bytes:
    expected = width if packed and size else 1
    if len(fields) != expected:
        raise MalformedTensor(f"values come in {len(fields)} pieces, {expected} are meant")
    if not packed or not size:
        return _field(fields[0], packed=False, at_most=size)
    unpacked = [unpack(field, at_most=size // width) for field in fields]
    if any(len(plane) != size // width for plane in unpacked):
        raise MalformedTensor(f"a byte plane of the values has not the {size // width} bytes that are meant")
    return from_planes(unpacked) if width > 1 else unpacked[0]
