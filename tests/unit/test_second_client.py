"""docs/protocol.md is enough: a second implementation, written from it alone, agrees with the product to the byte.

The first half knows numpy, struct, zlib, zstandard, hashlib and the generated messages; nothing of gradwire's codec,
wire or manifest. Its numbers in brackets are sections of the document. The second half compares the two.
"""

from __future__ import annotations

import ast
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import zstandard
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import codec
from gradwire.codec import Dense, Encoded, Form, Scheme, TopK
from gradwire.corpus import Corpus
from gradwire.errors import MalformedTensor
from gradwire.manifest import Entry, Manifest, Role
from gradwire.samples import SampleOrder
from gradwire.v1 import aggregation_pb2 as apb
from gradwire.v1 import tensors_pb2 as pb
from gradwire.wire.messages import PartReader, Tally, absent_positions, write_parts
from gradwire.wire.schemas import entry_to_message
from support import aggregator, run_config

Array = np.ndarray[Any, Any]

# --- the second implementation


@dataclass
class Bytes:
    """One encoded tensor [12]."""

    form: int
    values: bytes
    indices: bytes = b""
    counts: bytes = b""


def fingerprint(method: str, entries: Sequence[pb.ManifestEntry]) -> bytes:
    """[7]"""
    data = b"gradwire-manifest-1\0" + text(method) + struct.pack("<I", len(entries))
    for entry in entries:
        data += text(entry.name) + bytes([entry.role, len(entry.shape)])
        data += b"".join(struct.pack("<Q", size) for size in entry.shape)
        if entry.scheme.WhichOneof("kind") == "dense":
            data += bytes([1, entry.scheme.dense.values])
        else:
            top_k = entry.scheme.top_k
            data += struct.pack("<BII", 2, top_k.k, top_k.chunk)
            data += bytes([top_k.layout, top_k.values, top_k.indices])
            data += struct.pack("<QB", top_k.dense_below, top_k.normalization)
    return hashlib.sha256(data).digest()


def text(value: str) -> bytes:
    return struct.pack("<H", len(value.encode())) + value.encode()


def chunks_of(entry: pb.ManifestEntry) -> list[tuple[Array, int]] | None:
    """Each chunk's positions in the row-major tensor, and how many entries it keeps; None where dense [8]."""
    elements = math.prod(entry.shape)
    top_k = entry.scheme.top_k
    if entry.scheme.WhichOneof("kind") == "dense" or elements == 0 or elements < top_k.dense_below:
        return None
    positions = np.arange(elements)
    if top_k.layout == pb.CHUNK_LAYOUT_TILES:
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        side = math.isqrt(top_k.chunk)
        high, wide = largest_divisor(rows, side), largest_divisor(elements // rows, side)
        if 4 * high * wide >= top_k.chunk:
            matrix, kept = positions.reshape(rows, -1), min(top_k.k, high * wide)
            return [
                (matrix[top : top + high, left : left + wide].reshape(-1), kept)
                for top in range(0, matrix.shape[0], high)
                for left in range(0, matrix.shape[1], wide)
            ]
    runs = [positions[start : start + top_k.chunk] for start in range(0, elements, top_k.chunk)]
    return [(run, -(-top_k.k * len(run) // top_k.chunk)) for run in runs]


def largest_divisor(number: int, at_most: int) -> int:
    return max(divisor for divisor in range(1, at_most + 1) if number % divisor == 0)


def value_type(entry: pb.ManifestEntry) -> int:
    return entry.scheme.dense.values if entry.scheme.WhichOneof("kind") == "dense" else entry.scheme.top_k.values


def width_of(entry: pb.ManifestEntry) -> int:
    return 4 if value_type(entry) == pb.VALUE_TYPE_FP32 else 2


def pack_values(values: Array, entry: pb.ManifestEntry) -> bytes:
    """[10]"""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    if width_of(entry) == 4:
        return bits.tobytes()
    wide = bits.astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()


def unpack_values(data: bytes, entry: pb.ManifestEntry) -> Array:
    if width_of(entry) == 4:
        return np.frombuffer(data, "<f4")
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def pack_indices(form: int, indices: Sequence[int], length: int) -> bytes:
    """One chunk's [11]."""
    if form == pb.FORM_U8:
        return bytes(indices)
    if form == pb.FORM_U16:
        return struct.pack(f"<{len(indices)}H", *indices)
    if form == pb.FORM_BITMAP:
        bits = sum(1 << index for index in indices)
        return bits.to_bytes((length + 7) // 8, "little")
    gaps = [here - before - 1 for before, here in zip([-1, *indices[:-1]], indices, strict=True)]
    return b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in gaps)


def unpack_indices(form: int, data: bytes, count: int, length: int) -> tuple[list[int], int]:
    """One chunk's `count` indices from the front of `data`, and how many bytes they took."""
    if form == pb.FORM_U8:
        return list(data[:count]), count
    if form == pb.FORM_U16:
        return list(struct.unpack(f"<{count}H", data[: 2 * count])), 2 * count
    if form == pb.FORM_BITMAP:
        size = (length + 7) // 8
        bits = int.from_bytes(data[:size], "little")
        return [index for index in range(length) if bits >> index & 1], size
    indices, previous, used = [], -1, 0
    for _ in range(count):
        gap = 0
        while data[used] == 255:
            gap, used = gap + 255, used + 1
        previous += gap + data[used] + 1
        used += 1
        indices.append(previous)
    return indices, used


def encode(tensor: Array, entry: pb.ManifestEntry) -> Bytes:
    """A contribution to one tensor [9, 12]."""
    flat, chunks = tensor.reshape(-1), chunks_of(entry)
    if chunks is None:
        return Bytes(pb.FORM_DENSE, pack_values(flat, entry))
    chosen, values = [], []
    for positions, kept in chunks:
        magnitudes = np.abs(flat[positions])
        best = sorted(range(len(positions)), key=lambda at: (-magnitudes[at], at))[:kept]
        chosen.append(sorted(best))
        values.append(flat[positions[chosen[-1]]])
    packed = [(form, pack_all(form, chosen, chunks)) for form in forms(entry.scheme.top_k)]
    form, indices = min(packed, key=lambda each: len(each[1]))
    return Bytes(form, pack_values(np.concatenate(values), entry), indices)


def forms(top_k: pb.TopKScheme) -> list[int]:
    named = {
        pb.INDEX_FORM_U8: pb.FORM_U8,
        pb.INDEX_FORM_U16: pb.FORM_U16,
        pb.INDEX_FORM_GAP8: pb.FORM_GAP8,
    }
    if top_k.indices != pb.INDEX_FORM_AUTO:
        return [named[top_k.indices]]
    return [*([pb.FORM_U8] if top_k.chunk <= 256 else []), pb.FORM_U16, pb.FORM_GAP8]


def pack_all(form: int, chosen: Sequence[Sequence[int]], chunks: Sequence[tuple[Array, int]]) -> bytes:
    pairs = zip(chosen, chunks, strict=True)
    return b"".join(pack_indices(form, indices, len(positions)) for indices, (positions, _) in pairs)


def entries_of(encoded: Bytes, entry: pb.ManifestEntry) -> list[tuple[Array, Array]]:
    """Of every chunk the positions in the tensor and the values; one chunk of all where dense."""
    chunks, values = chunks_of(entry), unpack_values(encoded.values, entry)
    if chunks is None or encoded.form == pb.FORM_DENSE:
        return [(np.arange(len(values)), values)]
    counts = np.frombuffer(encoded.counts, "<u2").tolist() or [kept for _, kept in chunks]
    found, taken, used = [], 0, 0
    for (positions, _), count in zip(chunks, counts, strict=True):
        indices, size = unpack_indices(encoded.form, encoded.indices[used:], count, len(positions))
        found.append((positions[indices], values[taken : taken + count]))
        taken, used = taken + count, used + size
    assert (taken, used) == (len(values), len(encoded.indices))
    return found


def decode(encoded: Bytes, entry: pb.ManifestEntry) -> Array:
    """[12]"""
    flat = np.zeros(math.prod(entry.shape), "<f4")
    for positions, values in entries_of(encoded, entry):
        flat[positions] = values
    return flat.reshape(tuple(entry.shape))


def average(contributions: Sequence[Bytes | None], weights: Sequence[int], entry: pb.ManifestEntry) -> Bytes | None:
    """[13], contributions in ascending worker order."""
    top_k = entry.scheme.top_k
    by_senders = entry.scheme.WhichOneof("kind") == "top_k" and top_k.normalization == pb.NORMALIZATION_SENDERS
    sent = [(each, weight) for each, weight in zip(contributions, weights, strict=True) if each is not None]
    if not sent:
        return None
    total = sum(weight for _, weight in sent) if by_senders else sum(weights)
    size = math.prod(entry.shape)
    mean, factors = np.zeros(size, "<f4"), np.zeros(size, "<f4")
    latest, senders = np.zeros(size, "<f4"), np.zeros(size, int)
    for each, weight in sent:
        factor = np.float32(weight / total)
        for positions, values in entries_of(each, entry):
            product = factor * values
            mean[positions] = np.where(senders[positions] == 0, product, mean[positions] + product)
            factors[positions] += factor
            latest[positions] = values
            senders[positions] += 1
    if by_senders:
        mean = np.where(senders == 1, latest, mean / np.where(senders == 0, np.float32(1), factors))
    return aggregate(mean, senders > 0, entry)


def aggregate(mean: Array, present: Array, entry: pb.ManifestEntry) -> Bytes:
    """The shortest form of the union [12]."""
    chunks, width = chunks_of(entry), width_of(entry)
    dense = Bytes(pb.FORM_DENSE, pack_values(mean, entry))
    if chunks is None:
        return dense
    chosen = [np.flatnonzero(present[positions]).tolist() for positions, _ in chunks]
    values = np.concatenate([mean[positions[at]] for (positions, _), at in zip(chunks, chosen, strict=True)])
    gaps, bitmap = pack_all(pb.FORM_GAP8, chosen, chunks), pack_all(pb.FORM_BITMAP, chosen, chunks)
    form, indices = (pb.FORM_GAP8, gaps) if len(gaps) <= len(bitmap) else (pb.FORM_BITMAP, bitmap)
    counts = struct.pack(f"<{len(chosen)}H", *map(len, chosen))
    sparse = len(values) * width + len(counts) + len(indices)
    return dense if len(mean) * width < sparse else Bytes(form, pack_values(values, entry), indices, counts)


def write(
    entries: Sequence[pb.ManifestEntry], tensors: Sequence[Bytes | None], *, units: int, zstd: bool
) -> tuple[list[pb.Part], pb.Commit]:
    """A stream of parts, `units` chunks or elements each, and its commit [14, 15]."""
    parts, crc, payload = [], 0, 0
    for number, (entry, encoded) in enumerate(zip(entries, tensors, strict=True)):
        if encoded is None:
            continue
        for first, count, *fields in pieces(encoded, entry, units):
            values, counts, indices = fields
            part = pb.Part(tensor=number, form=encoded.form, first=first, count=count)
            if zstd:
                part.packing = pb.PACKING_ZSTD
                width = width_of(entry)
                part.values.extend(squeeze(values[plane::width]) for plane in range(width))
                part.counts, part.indices = squeeze(counts), squeeze(indices)
            else:
                part.packing = pb.PACKING_NONE
                part.values.append(values)
                part.counts, part.indices = counts, indices
            for field in fields:
                crc, payload = zlib.crc32(field, crc), payload + len(field)
            parts.append(part)
    return parts, pb.Commit(parts=len(parts), payload_bytes=payload, crc32=crc)


def squeeze(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data) if data else b""


def pieces(encoded: Bytes, entry: pb.ManifestEntry, units: int) -> Iterator[tuple[int, int, bytes, bytes, bytes]]:
    """(first, count, values, counts, indices)"""
    chunks, width = chunks_of(entry), width_of(entry)
    if chunks is None or encoded.form == pb.FORM_DENSE:
        for first in range(0, len(encoded.values) // width, units):
            data = encoded.values[first * width : (first + units) * width]
            yield first, len(data) // width, data, b"", b""
        return
    kept = np.frombuffer(encoded.counts, "<u2").tolist() or [count for _, count in chunks]
    taken, used = 0, 0
    for first in range(0, len(chunks), units):
        value_at, index_at = taken, used
        for (positions, _), count in zip(chunks[first : first + units], kept[first : first + units], strict=True):
            used += unpack_indices(encoded.form, encoded.indices[used:], count, len(positions))[1]
            taken += count
        values = encoded.values[value_at * width : taken * width]
        counts = encoded.counts[2 * first : 2 * (first + units)]
        yield first, len(chunks[first : first + units]), values, counts, encoded.indices[index_at:used]


def read(
    entries: Sequence[pb.ManifestEntry], parts: Sequence[pb.Part], commit: pb.Commit, absent: Sequence[int]
) -> list[Bytes | None]:
    """The tensors in a stream [14, 15]."""
    tensors: list[Bytes | None] = [
        None if number in absent else Bytes(pb.FORM_DENSE, b"") for number in range(len(entries))
    ]
    crc, payload = 0, 0
    for part in parts:
        tensor = tensors[part.tensor]
        assert tensor is not None
        fields = [b"".join(part.values), part.counts, part.indices]
        if part.packing == pb.PACKING_ZSTD:
            each = [expand(frame) for frame in part.values]
            assert len(each) == width_of(entries[part.tensor])
            fields = [bytes(np.stack([np.frombuffer(plane, np.uint8) for plane in each], 1).reshape(-1))]
            fields += [expand(part.counts), expand(part.indices)]
        tensor.form = part.form
        tensor.values += fields[0]
        tensor.counts += fields[1]
        tensor.indices += fields[2]
        assert sum(map(len, fields)) <= 524288
        for field in fields:
            crc, payload = zlib.crc32(field, crc), payload + len(field)
    assert (commit.parts, commit.payload_bytes, commit.crc32) == (len(parts), payload, crc)
    return tensors


def expand(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame) if frame else b""


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """[16]"""
    c, (k0, k1), low = list(counter), key, 2**64 - 1
    for _ in range(10):
        p, q = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(q >> 64) ^ c[1] ^ k0, q & low, (p >> 64) ^ c[3] ^ k1, p & low]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & low, (k1 + 0xBB67AE8584CAA73B) & low
    return c


def items(seed: int, length: int, start: int, stop: int) -> list[int]:
    """The items that samples [start, stop) stand for [16]."""
    found = []
    for sample in range(start, stop):
        epoch, at = divmod(sample, length)
        draws = [word for block in range(-(-length // 4)) for word in philox((block + 1, 0, 0, 0), (seed, epoch))]
        found.append(sorted(range(length), key=lambda n, draws=draws: draws[n])[at])  # type: ignore[misc]
    return found


def training_text(data: bytes, held_out_fraction: float) -> bytes:
    """[16]"""
    return data[: len(data) - math.ceil(len(data) * held_out_fraction)]


# --- compared with the product

SPARSE: list[Scheme] = [
    TopK(k=k, chunk=chunk, layout=layout, values=values, indices=indices, dense_below=below, normalization=by)
    for k, chunk, layout, values, indices, below, by in (
        (3, 16, "tiles", "bf16", "auto", 0, "senders"),
        (5, 64, "tiles", "fp32", "u8", 0, "contributors"),
        (7, 64, "flat", "bf16", "u16", 20, "contributors"),
        (1, 1024, "flat", "fp32", "gap8", 0, "senders"),
        (4, 4096, "tiles", "bf16", "auto", 0, "contributors"),
        (64, 4096, "tiles", "bf16", "auto", 100, "senders"),
        (9, 10, "flat", "bf16", "auto", 0, "senders"),
    )
]
SCHEMES: list[Scheme] = [Dense("bf16"), Dense("fp32"), *SPARSE]
SHAPES = [(), (1,), (17,), (0, 4), (6, 4), (16, 3, 5), (64, 70), (13, 11), (2, 3, 4, 5), (40, 33), (2, 5000)]
CASES = [(scheme, shape) for scheme in SCHEMES for shape in SHAPES]


def tensors_for(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Random numbers of many sizes, among them equal magnitudes, zeros and a negative zero."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-3, 3, generator=generator)
    coarse = torch.randint(-3, 4, shape, generator=generator).float()
    mixed = torch.where(torch.rand(shape, generator=generator) < 0.5, wide, coarse)
    return torch.where(torch.rand(shape, generator=generator) < 0.1, torch.tensor(-0.0), mixed)


def same(ours: Bytes | None, theirs: Encoded | None) -> bool:
    if ours is None or theirs is None:
        return ours is None and theirs is None
    pairs = (ours.values, theirs.values), (ours.indices, theirs.indices), (ours.counts, theirs.counts)
    return ours.form == int(theirs.form) and all(one == other for one, other in pairs)


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()


def manifest_of_all(shape_seed: int) -> Manifest:
    chosen = CASES[shape_seed::3]
    entries = (Entry(f"t{n}", shape, scheme, Role(1 + n % 2)) for n, (scheme, shape) in enumerate(chosen))
    return Manifest("gradients:SGD", tuple(entries))


def test_the_second_implementation_uses_nothing_of_the_products():
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    product = {
        alias.asname or alias.name
        for node in module.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gradwire")
        for alias in node.names
    } - {"pb", "apb"}
    first_of_the_rest = next(n for n, node in enumerate(module.body) if isinstance(node, ast.AnnAssign))
    peers = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Peer"]
    ours = [
        node for node in module.body[:first_of_the_rest] if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ] + peers
    names = {node.id for each in ours for node in ast.walk(each) if isinstance(node, ast.Name)}
    assert len(ours) > 20
    assert not names & product


@pytest.mark.parametrize(("scheme", "shape"), CASES, ids=str)
def test_a_tensor_has_the_same_bytes(scheme, shape):
    entry = entry_to_message(Entry("w", shape, scheme))
    for seed in range(2):
        tensor = tensors_for(seed, shape)
        theirs, ours = codec.encode(tensor, scheme), encode(tensor.numpy(), entry)
        assert same(ours, theirs)
        assert bits(decode(ours, entry)) == bits(codec.decode(theirs, scheme, shape).numpy())


@pytest.mark.parametrize("senders", [1, 2, 5])
@pytest.mark.parametrize(("scheme", "shape"), CASES, ids=str)
def test_an_average_has_the_same_bytes(scheme, shape, senders):
    entry = entry_to_message(Entry("w", shape, scheme))
    weights = [16, 48, 1, 7, 320][:senders]
    tensors = [tensors_for(10 + seed, shape) for seed in range(senders)]
    for missing in (None, senders - 1):
        theirs = [None if n == missing else codec.encode(each, scheme) for n, each in enumerate(tensors)]
        ours = [None if n == missing else encode(each.numpy(), entry) for n, each in enumerate(tensors)]
        mean = codec.average(theirs, weights, scheme=scheme, shape=shape)
        again = average(ours, weights, entry)
        assert same(again, mean)
        if mean is not None and again is not None:
            assert bits(decode(again, entry)) == bits(codec.decode(mean, scheme, shape).numpy())


def test_every_form_is_among_the_cases():
    contributions, aggregates = set(), set()
    for scheme, shape in CASES:
        encoded = [codec.encode(tensors_for(seed, shape), scheme) for seed in range(5)]
        contributions.add(encoded[0].form)
        for each in (encoded, encoded[:1]):
            mean = codec.average(each, [1] * len(each), scheme=scheme, shape=shape)
            if mean is not None and isinstance(scheme, TopK) and math.prod(shape) > scheme.dense_below:
                aggregates.add(mean.form)
    assert contributions == {Form.DENSE, Form.U8, Form.U16, Form.GAP8}
    assert aggregates == {Form.DENSE, Form.GAP8, Form.BITMAP}


@pytest.mark.parametrize("number", range(3))
def test_the_fingerprint_is_the_same(number):
    manifest = manifest_of_all(number)
    assert fingerprint(manifest.method, [entry_to_message(each) for each in manifest]) == manifest.fingerprint


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("number", range(3))
def test_the_second_client_reads_what_the_product_writes(number, packed):
    manifest = manifest_of_all(number)
    entries = [entry_to_message(each) for each in manifest]
    tensors: list[Encoded | None] = [codec.encode(tensors_for(n, e.shape), e.scheme) for n, e in enumerate(manifest)]
    tensors[2] = None
    contribution = Tally()
    parts = list(write_parts(manifest, tensors, contribution, packed=packed))
    found = read(entries, parts, contribution.commit(), absent_positions(tensors))
    assert all(map(same, found, tensors))

    means = [
        codec.average([each, each], [1, 2], scheme=e.scheme, shape=e.shape) for each, e in pairs(tensors, manifest)
    ]
    mean_tally = Tally()
    parts = list(write_parts(manifest, means, mean_tally, packed=packed))
    assert all(map(same, read(entries, parts, mean_tally.commit(), absent_positions(means)), means))


def pairs(tensors: Sequence[Encoded | None], manifest: Manifest) -> Iterator[tuple[Encoded | None, Entry]]:
    return zip(tensors, manifest, strict=True)


@pytest.mark.parametrize("units", [1, 3, 1 << 16])
@pytest.mark.parametrize("zstd", [True, False], ids=["zstd", "plain"])
@pytest.mark.parametrize("number", range(3))
def test_the_product_reads_what_the_second_client_writes(number, zstd, units):
    chosen = manifest_of_all(number)
    manifest = Manifest(chosen.method, tuple(entry for entry in chosen if entry.elements < 600))
    entries = [entry_to_message(each) for each in manifest]
    tensors: list[Bytes | None] = [
        encode(tensors_for(n, entry.shape).numpy(), message)
        for n, (entry, message) in enumerate(zip(manifest, entries, strict=True))
    ]
    tensors[1] = None
    parts, commit = write(entries, tensors, units=units, zstd=zstd)
    assert all(map(same, tensors, accepted(manifest, parts, commit, absent=[1], aggregate=False)))

    means = [average([each, each], [3, 1], entry) for each, entry in zip(tensors, entries, strict=True)]
    parts, commit = write(entries, means, units=units, zstd=zstd)
    assert all(map(same, means, accepted(manifest, parts, commit, absent=[1], aggregate=True)))


def accepted(
    manifest: Manifest, parts: Sequence[pb.Part], commit: pb.Commit, *, absent: Sequence[int], aggregate: bool
) -> list[Encoded | None]:
    """What the product's reader makes of messages that crossed the wire."""
    reader = PartReader(manifest, absent=absent, aggregate=aggregate)
    for part in parts:
        reader.add(pb.Part.FromString(part.SerializeToString()))
    return reader.finish(pb.Commit.FromString(commit.SerializeToString()))


def test_the_product_refuses_what_the_second_client_left_out():
    manifest = Manifest("m", (Entry("w", (40, 33), SPARSE[0]),))
    entries = [entry_to_message(each) for each in manifest]
    parts, commit = write(entries, [encode(tensors_for(0, (40, 33)).numpy(), entries[0])], units=5, zstd=True)
    with pytest.raises(MalformedTensor, match="w: the tensor ends after"):
        accepted(manifest, parts[:-1], commit, absent=[], aggregate=False)


class Peer:
    """A worker of the second implementation, one call at a time [1, 2]."""

    def __init__(self, address: str, name: str, entries: Sequence[pb.ManifestEntry], method: str, token: str) -> None:
        self.name, self.entries, self.method = name, entries, method
        self.channel = grpc.insecure_channel(address)
        self.metadata = (("authorization", f"Bearer {token}"),)
        self.session = b""

    def call(self, name: str, kind: str, answer: type[Message]) -> Any:
        """The callable of an RPC; kind is that of grpc.Channel, such as `unary_unary`."""
        path = f"/gradwire.v1.AggregationService/{name}"
        method = getattr(self.channel, kind)(path, lambda message: message.SerializeToString(), answer.FromString)
        return lambda sent: method(sent, metadata=self.metadata, timeout=30)

    def join(self) -> apb.JoinResponse:
        header = apb.JoinHeader(protocol=1, worker=self.name, incarnation=self.name.encode().ljust(16), device="none")
        header.method, header.entries = self.method, len(self.entries)
        header.manifest_sha256 = fingerprint(self.method, self.entries)
        messages = [apb.JoinRequest(header=header)]
        messages.append(apb.JoinRequest(entries=apb.ManifestEntries(entries=self.entries)))
        joined: apb.JoinResponse = self.call("Join", "stream_unary", apb.JoinResponse)(iter(messages))
        self.session = joined.session
        return joined

    def publish(self, data: bytes) -> None:
        header = apb.SnapshotHeader(round=0, size=len(data), sha256=hashlib.sha256(data).digest())
        fields = {"session": self.session}, {"header": header}, {"data": data[:5]}, {"data": data[5:]}
        call = self.call("PublishSnapshot", "stream_unary", apb.PublishSnapshotResponse)
        call(apb.PublishSnapshotRequest(**field) for field in fields)

    def fetch(self) -> tuple[int, bytes]:
        call = self.call("FetchSnapshot", "unary_stream", apb.FetchSnapshotResponse)
        messages = list(call(apb.FetchSnapshotRequest(session=self.session)))
        header = next(each.header for each in messages if each.WhichOneof("kind") == "header")
        data = b"".join(each.data for each in messages)
        assert hashlib.sha256(data).digest() == header.sha256
        return header.round, data

    def begin(self, number: int) -> apb.BeginResponse:
        call = self.call("Begin", "unary_unary", apb.BeginResponse)
        while True:
            answer: apb.BeginResponse = call(apb.BeginRequest(session=self.session, round=number))
            if answer.order != apb.ORDER_WAIT:
                return answer

    def contribute(self, number: int, share: apb.BeginResponse, tensors: Sequence[Bytes | None]) -> int:
        header = apb.ContributeHeader(session=self.session, round=number, assignment=share.assignment)
        header.samples = sum(each.stop - each.start for each in share.ranges)
        header.absent.extend(n for n, each in enumerate(tensors) if each is None)
        parts, commit = write(self.entries, tensors, units=7, zstd=True)
        messages = [apb.ContributeRequest(header=header), *(apb.ContributeRequest(part=part) for part in parts)]
        messages.append(apb.ContributeRequest(commit=commit))
        verdict = self.call("Contribute", "stream_unary", apb.ContributeResponse)(iter(messages))
        return int(verdict.verdict)

    def collect(self, number: int) -> tuple[apb.AggregateHeader, list[Bytes | None]]:
        call = self.call("Collect", "unary_stream", apb.CollectResponse)
        messages = [m for m in call(apb.CollectRequest(session=self.session, round=number)) if not m.note]
        header, parts, commit = messages[0].header, [each.part for each in messages[1:-1]], messages[-1].commit
        return header, read(self.entries, parts, commit, header.absent)

    def leave(self) -> None:
        self.call("Leave", "unary_unary", apb.LeaveResponse)(apb.LeaveRequest(session=self.session))
        self.channel.close()


def test_two_second_clients_make_a_run_with_the_aggregator():
    entries = [entry_to_message(each) for each in manifest_of_all(1) if each.elements < 600]
    config = run_config(rounds=2, min_workers=2, global_batch=4)
    with aggregator(config, token="secret") as serving, ThreadPoolExecutor(2) as pool:
        peers = [Peer(serving.address, name, entries, "gradients:SGD", "secret") for name in ("ann", "bob")]
        ann, bob = peers
        assert ann.join().start_from == apb.START_FROM_PUBLISH
        ann.publish(b"the first weights")
        assert bob.join().start_from == apb.START_FROM_SNAPSHOT
        assert bob.fetch() == (0, b"the first weights")
        for number in range(2):
            shares = list(pool.map(lambda peer, number=number: peer.begin(number), peers))
            assert [each.order for each in shares] == [apb.ORDER_TRAIN] * 2
            sent = [contribution_of(entries, seed=10 * number + n) for n in range(2)]
            sent[1][3] = None
            verdicts = [peer.contribute(number, *each) for peer, *each in zip(peers, shares, sent, strict=True)]
            assert verdicts == [apb.VERDICT_ACCEPTED] * 2
            expected = [average([sent[0][n], sent[1][n]], [2, 2], entry) for n, entry in enumerate(entries)]
            for peer in peers:
                header, mean = peer.collect(number)
                assert [(each.worker, each.samples) for each in header.contributors] == [("ann", 2), ("bob", 2)]
                assert mean == expected
        assert ann.contribute(1, shares[0], sent[0]) == apb.VERDICT_LATE
        assert [peer.begin(2).order for peer in peers] == [apb.ORDER_END] * 2
        for peer in peers:
            peer.leave()


def contribution_of(entries: Sequence[pb.ManifestEntry], seed: int) -> list[Bytes | None]:
    return [encode(tensors_for(seed + n, tuple(entry.shape)).numpy(), entry) for n, entry in enumerate(entries)]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**64 - 1), length=st.integers(1, 40), start=st.integers(0, 120), count=st.integers(0, 50))
def test_samples_come_in_the_same_order(seed, length, start, count):
    assert items(seed, length, start, start + count) == SampleOrder(seed, length).indices(start, start + count).tolist()


@pytest.mark.parametrize("size", [100, 16384 * 25 + 7, 1_000_003])
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.37, 0.89])
def test_the_training_text_is_the_same(size, fraction):
    data = np.random.default_rng(size).bytes(size)
    assert training_text(data, fraction) == Corpus(data).split(fraction)[0]
