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
from gradwire.codec import Dense, Encoded, Form, Scheme, TopK, dct
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
    scales: bytes = b""


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
            data += bytes([top_k.transform, top_k.update, top_k.clip])
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
        rows, (high, wide) = rows_of(entry), tile_of(entry)
        if top_k.transform == pb.TRANSFORM_DCT or 4 * high * wide >= top_k.chunk:
            matrix, kept = positions.reshape(rows, -1), min(top_k.k, high * wide)
            return [
                (matrix[top : top + high, left : left + wide].reshape(-1), kept)
                for top in range(0, matrix.shape[0], high)
                for left in range(0, matrix.shape[1], wide)
            ]
    runs = [positions[start : start + top_k.chunk] for start in range(0, elements, top_k.chunk)]
    return [(run, -(-top_k.k * len(run) // top_k.chunk)) for run in runs]


def rows_of(entry: pb.ManifestEntry) -> int:
    return entry.shape[0] if len(entry.shape) > 1 else 1


def tile_of(entry: pb.ManifestEntry) -> tuple[int, int]:
    """Height and width of a tile, of a tensor that has elements [8]."""
    rows, side = rows_of(entry), math.isqrt(entry.scheme.top_k.chunk)
    return largest_divisor(rows, side), largest_divisor(math.prod(entry.shape) // rows, side)


def largest_divisor(number: int, at_most: int) -> int:
    return max(divisor for divisor in range(1, at_most + 1) if number % divisor == 0)


def basis(side: int) -> Array:
    """The orthonormal DCT-II, frequencies down [8]."""
    frequency, place = np.arange(side)[:, None], np.arange(side)[None, :]
    waves = np.sqrt(2 / side) * np.cos(np.pi * (2 * place + 1) * frequency / (2 * side))
    waves[0] = np.sqrt(1 / side)
    return waves.astype("<f4")


def transformed(flat: Array, entry: pb.ManifestEntry, *, undo: bool = False) -> Array:
    """The coefficients of every tile in the places of its elements, or the elements again [8]."""
    chunks = chunks_of(entry)
    if chunks is None or entry.scheme.top_k.transform != pb.TRANSFORM_DCT:
        return flat
    vertical, horizontal = map(basis, tile_of(entry))
    found = np.empty_like(flat)
    for positions, _ in chunks:
        tile = flat[positions].reshape(len(vertical), len(horizontal))
        turned = vertical.T @ tile @ horizontal if undo else vertical @ tile @ horizontal.T
        found[positions] = turned.reshape(-1)
    return found


def value_type(entry: pb.ManifestEntry) -> int:
    return entry.scheme.dense.values if entry.scheme.WhichOneof("kind") == "dense" else entry.scheme.top_k.values


def width_of(entry: pb.ManifestEntry) -> int:
    """Of values that are no signs; those of dense tensors and averages are bf16 under VALUE_TYPE_SIGN [10]."""
    return 4 if value_type(entry) == pb.VALUE_TYPE_FP32 else 2


def are_signs(form: int, counts: bytes, entry: pb.ManifestEntry) -> bool:
    """Whether the values of a tensor, or of a part of one, are one bit each. Only aggregates have counts [10, 12]."""
    sent = value_type(entry) == pb.VALUE_TYPE_SIGN and form != pb.FORM_DENSE and not counts
    return sent or form == pb.FORM_SIGN


def pack_bf16(values: Array) -> bytes:
    """[10]"""
    wide = np.ascontiguousarray(values, dtype="<f4").view("<u4").astype(np.uint64)
    return ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()


def unpack_bf16(data: bytes) -> Array:
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")


def pack_values(values: Array, entry: pb.ManifestEntry) -> bytes:
    return np.ascontiguousarray(values, dtype="<f4").tobytes() if width_of(entry) == 4 else pack_bf16(values)


def unpack_values(data: bytes, entry: pb.ManifestEntry) -> Array:
    return np.frombuffer(data, "<f4") if width_of(entry) == 4 else unpack_bf16(data)


def pack_signs(chunks: Sequence[Array]) -> bytes:
    """[10]"""
    return b"".join(np.packbits(values < 0, bitorder="little").tobytes() for values in chunks)


def scale_of(values: Array) -> np.float32:
    """One chunk's, before it is bf16 [10]."""
    total = np.float32(0)
    for value in values:
        total = total + np.abs(value)
    return np.float32(total / np.float32(len(values)))


def unpack_signs(data: bytes, scales: bytes, counts: Sequence[int]) -> Array:
    """The values of all chunks; without scales the magnitude is 1."""
    magnitudes = unpack_bf16(scales) if scales else np.ones(len(counts), "<f4")
    found, used = [], 0
    for count, magnitude in zip(counts, magnitudes, strict=True):
        size = (count + 7) // 8
        bits = np.unpackbits(np.frombuffer(data[used : used + size], np.uint8), bitorder="little")
        assert not bits[count:].any()
        found.append(np.where(bits[:count] == 1, -magnitude, magnitude))
        used += size
    assert used == len(data)
    return np.concatenate(found)


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
    if form == pb.FORM_SIGN:
        return list(range(count)), 0
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
    return chosen_of(transformed(tensor.reshape(-1), entry), entry)


def chosen_of(coefficients: Array, entry: pb.ManifestEntry) -> Bytes:
    """The contribution that follows from the coefficients, each in the place of an element."""
    chunks = chunks_of(entry)
    if chunks is None:
        return Bytes(pb.FORM_DENSE, pack_values(coefficients, entry))
    chosen, values = [], []
    for positions, kept in chunks:
        magnitudes = np.abs(coefficients[positions])
        best = sorted(range(len(positions)), key=lambda at: (-magnitudes[at], at))[:kept]
        chosen.append(sorted(best))
        values.append(coefficients[positions[chosen[-1]]])
    packed = [(form, pack_all(form, chosen, chunks)) for form in forms(entry.scheme.top_k)]
    form, indices = min(packed, key=lambda each: len(each[1]))
    if value_type(entry) == pb.VALUE_TYPE_SIGN:
        scales = pack_bf16(np.array([scale_of(each) for each in values]))
        return Bytes(form, pack_signs(values), indices, scales=scales)
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
    """Of every chunk the places in the tensor and the values; one chunk of all where dense."""
    chunks = chunks_of(entry)
    if chunks is None or encoded.form == pb.FORM_DENSE:
        values = unpack_values(encoded.values, entry)
        return [(np.arange(len(values)), values)]
    counts = np.frombuffer(encoded.counts, "<u2").tolist() or [kept for _, kept in chunks]
    if are_signs(encoded.form, encoded.counts, entry):
        values = unpack_signs(encoded.values, encoded.scales, counts)
    else:
        values = unpack_values(encoded.values, entry)
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
    if encoded.form != pb.FORM_SIGN:
        flat = transformed(flat, entry, undo=True)
    return flat.reshape(tuple(entry.shape))


def average(contributions: Sequence[Bytes | None], weights: Sequence[int], entry: pb.ManifestEntry) -> Bytes | None:
    """[13], contributions in ascending worker order."""
    means = means_of(contributions, weights, entry)
    return None if means is None else aggregate(*means, entry)


def means_of(
    contributions: Sequence[Bytes | None], weights: Sequence[int], entry: pb.ManifestEntry
) -> tuple[Array, Array] | None:
    """The mean of every coefficient, and whether anybody sent it; steps 1 to 5 of [13]."""
    top_k = entry.scheme.top_k
    by_senders = entry.scheme.WhichOneof("kind") == "top_k" and top_k.normalization == pb.NORMALIZATION_SENDERS
    sent = [(entries_of(each, entry), n) for each, n in zip(contributions, weights, strict=True) if each is not None]
    if not sent:
        return None
    if entry.scheme.WhichOneof("kind") == "top_k" and top_k.clip == pb.CLIP_MEDIAN:
        sent = clipped(sent)
    total = sum(weight for _, weight in sent) if by_senders else sum(weights)
    size = math.prod(entry.shape)
    mean, factors = np.zeros(size, "<f4"), np.zeros(size, "<f4")
    latest, senders = np.zeros(size, "<f4"), np.zeros(size, int)
    for chunks, weight in sent:
        factor = np.float32(weight / total)
        for positions, values in chunks:
            product = factor * values
            mean[positions] = np.where(senders[positions] == 0, product, mean[positions] + product)
            factors[positions] += factor
            latest[positions] = values
            senders[positions] += 1
    if by_senders:
        mean = np.where(senders == 1, latest, mean / np.where(senders == 0, np.float32(1), factors))
    return mean, senders > 0


Sent = list[tuple[list[tuple[Array, Array]], int]]


def clipped(sent: Sent) -> Sent:
    """The contributions with none of a norm above the median [13]."""
    norms = [math.sqrt(math.fsum(float(v) ** 2 for _, values in chunks for v in values)) for chunks, _ in sent]
    median = sorted(norms)[(len(norms) - 1) // 2]
    found: Sent = []
    for (chunks, weight), norm in zip(sent, norms, strict=True):
        if norm > median:
            factor = np.float32(median / norm)
            chunks = [(positions, values * factor) for positions, values in chunks]
        found.append((chunks, weight))
    return found


def aggregate(mean: Array, present: Array, entry: pb.ManifestEntry) -> Bytes:
    """The shortest form of the union, or the signs [12]."""
    chunks, width = chunks_of(entry), width_of(entry)
    dense = Bytes(pb.FORM_DENSE, pack_values(mean, entry))
    if chunks is None:
        return dense
    if entry.scheme.top_k.update == pb.UPDATE_SIGN:
        weights = transformed(mean, entry, undo=True)
        touched = [positions if mean[positions].any() else positions[:0] for positions, _ in chunks]
        counts = struct.pack(f"<{len(touched)}H", *map(len, touched))
        return Bytes(pb.FORM_SIGN, pack_signs([weights[positions] for positions in touched]), counts=counts)
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
            values, scales, counts, indices = fields
            part = pb.Part(tensor=number, form=encoded.form, first=first, count=count)
            if zstd:
                part.packing = pb.PACKING_ZSTD
                width = planes_of(part.form, counts, entry)
                part.values.extend(squeeze(values[plane::width]) for plane in range(width))
                part.scales, part.counts, part.indices = squeeze(scales), squeeze(counts), squeeze(indices)
            else:
                part.packing = pb.PACKING_NONE
                part.values.append(values)
                part.scales, part.counts, part.indices = scales, counts, indices
            for field in fields:
                crc, payload = zlib.crc32(field, crc), payload + len(field)
            parts.append(part)
    return parts, pb.Commit(parts=len(parts), payload_bytes=payload, crc32=crc)


def planes_of(form: int, counts: bytes, entry: pb.ManifestEntry) -> int:
    """[15]"""
    return 1 if are_signs(form, counts, entry) else width_of(entry)


def squeeze(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data) if data else b""


def pieces(
    encoded: Bytes, entry: pb.ManifestEntry, units: int
) -> Iterator[tuple[int, int, bytes, bytes, bytes, bytes]]:
    """(first, count, values, scales, counts, indices)"""
    chunks, width = chunks_of(entry), width_of(entry)
    if chunks is None or encoded.form == pb.FORM_DENSE:
        for first in range(0, len(encoded.values) // width, units):
            data = encoded.values[first * width : (first + units) * width]
            yield first, len(data) // width, data, b"", b"", b""
        return
    kept = np.frombuffer(encoded.counts, "<u2").tolist() or [count for _, count in chunks]
    signs = are_signs(encoded.form, encoded.counts, entry)
    taken, used = 0, 0
    for first in range(0, len(chunks), units):
        value_at, index_at = taken, used
        for (positions, _), count in zip(chunks[first : first + units], kept[first : first + units], strict=True):
            used += unpack_indices(encoded.form, encoded.indices[used:], count, len(positions))[1]
            taken += (count + 7) // 8 if signs else count * width
        scales, counts = (field[2 * first : 2 * (first + units)] for field in (encoded.scales, encoded.counts))
        number = len(chunks[first : first + units])
        yield first, number, encoded.values[value_at:taken], scales, counts, encoded.indices[index_at:used]


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
        fields = [b"".join(part.values), part.scales, part.counts, part.indices]
        if part.packing == pb.PACKING_ZSTD:
            each, rest = [expand(frame) for frame in part.values], [expand(frame) for frame in fields[1:]]
            assert len(each) == planes_of(part.form, rest[1], entries[part.tensor])
            fields = [bytes(np.stack([np.frombuffer(plane, np.uint8) for plane in each], 1).reshape(-1)), *rest]
        tensor.form = part.form
        tensor.values += fields[0]
        tensor.scales += fields[1]
        tensor.counts += fields[2]
        tensor.indices += fields[3]
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
SPARSE += [
    TopK(5, 16, values="sign", dense_below=0, normalization="senders"),
    TopK(11, 64, "flat", values="sign", indices="u16", dense_below=20, clip="median"),
    TopK(7, 64, dense_below=0, normalization="senders", clip="median"),
    TopK(1, 1024, "flat", values="fp32", indices="gap8", dense_below=20, clip="median"),
    TopK(5, 64, transform="dct", indices="u8", dense_below=0, normalization="senders"),
    TopK(40, 4096, transform="dct", values="fp32", dense_below=0, clip="median"),
    TopK(9, 256, transform="dct", values="sign", dense_below=20, normalization="senders", clip="median"),
    TopK(4, 256, transform="dct", dense_below=0, normalization="senders", update="sign"),
    TopK(40, 4096, transform="dct", values="sign", dense_below=20, update="sign", clip="median"),
]
SCHEMES: list[Scheme] = [Dense("bf16"), Dense("fp32"), *SPARSE]
SHAPES = [(), (1,), (17,), (0, 4), (6, 4), (16, 3, 5), (64, 70), (13, 11), (2, 3, 4, 5), (40, 33), (2, 5000)]
CASES = [(scheme, shape) for scheme in SCHEMES for shape in SHAPES]
TRANSFORMED = [(scheme, shape) for scheme, shape in CASES if isinstance(scheme, TopK) and scheme.transform]


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
    return ours == as_bytes(theirs)


def as_bytes(theirs: Encoded) -> Bytes:
    return Bytes(int(theirs.form), theirs.values, theirs.indices, theirs.counts, theirs.scales)


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()


def near(one: Array, other: Array) -> bool:
    """Whether these differ by no more than products in float32 do."""
    return bool((np.abs(one - other) <= 1e-5 * np.abs(one).max(initial=0)).all())


def products_coefficients(tensor: torch.Tensor, scheme: Scheme, entry: pb.ManifestEntry) -> Array:
    """The product's, each in the place of an element: its bytes follow from these, and not from ours [8]."""
    chunks = chunks_of(entry)
    if chunks is None or not isinstance(scheme, TopK) or scheme.transform is None:
        return tensor.numpy().reshape(-1)
    layout = codec.layout_of(scheme, tensor.shape)
    found = np.empty(tensor.numel(), "<f4")
    coefficients = dct.transform(layout.to_chunks(tensor), layout.tile_or_row)
    found[np.concatenate([positions for positions, _ in chunks])] = coefficients.numpy()
    return found


def same_mean(
    theirs: Bytes | None, contributions: Sequence[Bytes | None], weights: Sequence[int], entry: pb.ManifestEntry
) -> bool:
    """Whether an aggregate is the one that follows; in FORM_SIGN but for weights that are 0 within rounding."""
    ours, means = average(contributions, weights, entry), means_of(contributions, weights, entry)
    if ours is None or theirs is None or means is None or ours.form != pb.FORM_SIGN:
        return ours == theirs
    updates, certain = transformed(means[0], entry, undo=True), np.ones(math.prod(entry.shape), bool)
    for positions, _ in chunks_of(entry) or []:
        magnitudes = np.abs(updates[positions])
        certain[positions] = (magnitudes > 1e-5 * magnitudes.max()) | (magnitudes == 0)
    unlike = decode(ours, entry).reshape(-1) != decode(theirs, entry).reshape(-1)
    rest = [(each.form, each.counts, each.indices, each.scales, len(each.values)) for each in (ours, theirs)]
    return rest[0] == rest[1] and not unlike[certain].any() and unlike.mean() < 0.02


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
        theirs, ours = codec.encode(tensor, scheme), chosen_of(products_coefficients(tensor, scheme, entry), entry)
        assert same(ours, theirs)
        here, there = decode(ours, entry), codec.decode(theirs, scheme, shape).numpy()
        assert near(here, there)
        assert bits(here) == bits(there) or (scheme, shape) in TRANSFORMED


@pytest.mark.parametrize(
    ("first", "last", "scale"),
    [
        # Each 1 is lost in the sum with the large number, if that comes first; else it takes the mean to the next bf16.
        (2.0**24 + 2.0**16 - 2.0**10, 1.0, "0044"),
        (1.0, 2.0**24 + 2.0**16 - 2.0**10, "0144"),
        (2.0**-140, -(2.0**-140), "0000"),
    ],
)
def test_a_scale_is_a_sum_in_float32_in_the_order_of_the_indices(first, last, scale):
    scheme = TopK(k=32768, chunk=32768, layout="flat", values="sign", dense_below=0)
    tensor = torch.ones(32768) if abs(first) >= 1 else torch.zeros(32768)
    tensor[0], tensor[-1] = first, last
    theirs, entry = codec.encode(tensor, scheme), entry_to_message(Entry("w", (32768,), scheme))
    assert theirs.scales.hex() == scale
    assert same(encode(tensor.numpy(), entry), theirs)
    assert bits(decode(as_bytes(theirs), entry)) == bits(codec.decode(theirs, scheme, (32768,)).numpy())


@pytest.mark.parametrize(("scheme", "shape"), TRANSFORMED, ids=str)
def test_the_transform_is_the_same_within_float32_and_the_choice_but_for_ties(scheme, shape):
    entry = entry_to_message(Entry("w", shape, scheme))
    tensor = tensors_for(3, shape)
    coefficients = transformed(tensor.numpy().reshape(-1), entry)
    assert near(coefficients, products_coefficients(tensor, scheme, entry))
    assert near(transformed(coefficients, entry, undo=True), tensor.numpy().reshape(-1))
    theirs, ours = as_bytes(codec.encode(tensor, scheme)), encode(tensor.numpy(), entry)
    for (here, _), (there, _) in zip(entries_of(ours, entry), entries_of(theirs, entry), strict=True):
        tied = np.abs(coefficients[np.setxor1d(here, there)])
        assert np.ptp(tied) <= 1e-5 * np.abs(coefficients).max() if len(tied) else len(here) == len(there)


@pytest.mark.parametrize("senders", [1, 2, 5])
@pytest.mark.parametrize(("scheme", "shape"), CASES, ids=str)
def test_an_average_has_the_same_bytes(scheme, shape, senders):
    entry = entry_to_message(Entry("w", shape, scheme))
    weights = [16, 48, 1, 7, 320][:senders]
    tensors = [tensors_for(10 + seed, shape) for seed in range(senders)]
    coefficients = [products_coefficients(each, scheme, entry) for each in tensors]
    for missing in (None, senders - 1):
        theirs = [None if n == missing else codec.encode(each, scheme) for n, each in enumerate(tensors)]
        ours = [None if n == missing else chosen_of(each, entry) for n, each in enumerate(coefficients)]
        mean = codec.average(theirs, weights, scheme=scheme, shape=shape)
        assert same_mean(None if mean is None else as_bytes(mean), ours, weights, entry)
        if mean is not None:
            here, there = decode(as_bytes(mean), entry), codec.decode(mean, scheme, shape).numpy()
            assert near(here, there)
            assert bits(here) == bits(there) or (scheme, shape) in TRANSFORMED


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
    assert aggregates == {Form.DENSE, Form.GAP8, Form.BITMAP, Form.SIGN}


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
            for peer in peers:
                header, means = peer.collect(number)
                assert [(each.worker, each.samples) for each in header.contributors] == [("ann", 2), ("bob", 2)]
                for mean, entry, *each in zip(means, entries, *sent, strict=True):
                    assert same_mean(mean, each, [2, 2], entry)
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
