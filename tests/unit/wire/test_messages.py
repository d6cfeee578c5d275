"""Tensors as a stream of parts and back; whatever is wrong with a stream is a MalformedTensor and nothing else."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
import zstandard
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import codec
from gradwire.codec import Dense, Encoded, Form, TopK
from gradwire.errors import MalformedTensor
from gradwire.manifest import Entry, Manifest
from gradwire.v1 import tensors_pb2 as pb
from gradwire.wire.messages import PartReader, Tally, absent_positions, write_parts

PART_BYTES = 512 * 1024


def sparse(k, chunk, **more):
    return TopK(k=k, chunk=chunk, layout="flat", dense_below=0, **more)


MANIFEST = Manifest(
    "test",
    (
        Entry("weight", (40, 50), sparse(8, 256, indices="u16")),  # 8 chunks, the last of 208 with 7 entries
        Entry("bias", (50,), Dense("fp32")),
        Entry("empty", (0, 3), sparse(8, 256)),
        Entry("scalar", (), Dense("bf16")),
        Entry("gaps", (30, 30), sparse(4, 512, values="fp32", indices="gap8")),  # 2 chunks: 512 and 388
        Entry("signs", (40, 50), sparse(9, 256, values="sign", indices="u8")),  # 2 bytes of signs, of the last 1
        Entry("update", (9, 35), TopK(k=3, chunk=64, transform="dct", update="sign", dense_below=0)),  # 15 of 3 x 7
    ),
)


def contribution(manifest=MANIFEST, seed=0, absent=(), zeros=0.0):
    """Random tensors, of each of which the first `zeros` of its elements are 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(entry.shape, generator=generator) for entry in manifest]
    for tensor in tensors:
        tensor.view(-1)[: int(zeros * tensor.numel())] = 0.0
    encoded = [codec.encode(tensor, entry.scheme) for tensor, entry in zip(tensors, manifest, strict=True)]
    return [None if number in absent else each for number, each in enumerate(encoded)]


def mean(manifest=MANIFEST, workers=3, absent=(), zeros=0.0):
    """An aggregate of several contributions."""
    each = [contribution(manifest, seed, absent, zeros) for seed in range(workers)]
    return [
        codec.average([own[number] for own in each], [1.0] * workers, scheme=entry.scheme, shape=entry.shape)
        for number, entry in enumerate(manifest)
    ]


def sent(tensors, manifest=MANIFEST, *, packed=True):
    """(parts, commit) as they arrive at the other side."""
    tally = Tally()
    parts = [part.SerializeToString() for part in write_parts(manifest, tensors, tally, packed=packed)]
    return [pb.Part.FromString(part) for part in parts], pb.Commit.FromString(tally.commit().SerializeToString())


def read(parts, commit, manifest=MANIFEST, *, absent=(), aggregate=False):
    reader = PartReader(manifest, absent=absent, aggregate=aggregate)
    for part in parts:
        reader.add(part)
    return reader.finish(commit)


def unpacked(part, width):
    """(values, scales, counts, indices) of a part, by the wire's description alone."""
    rest = part.scales, part.counts, part.indices
    if part.packing == pb.PACKING_NONE:
        (values,) = part.values
        return values, *rest
    inflate = zstandard.ZstdDecompressor().decompress
    columns = [np.frombuffer(inflate(frame) if frame else b"", np.uint8) for frame in part.values]
    assert len(columns) == width
    values = np.empty(width * len(columns[0]), np.uint8)
    for plane, column in enumerate(columns):
        values[plane::width] = column
    return values.tobytes(), *(inflate(field) if field else b"" for field in rest)


def width_of(part, manifest=MANIFEST):
    """Byte planes of the values of a right part."""
    values = manifest.entries[part.tensor].scheme.values
    if part.form == pb.FORM_SIGN or (values == "sign" and part.form != pb.FORM_DENSE and not part.counts):
        return 1
    return 4 if values == "fp32" else 2


# Right ones


@st.composite
def streams(draw):
    """(manifest, tensors, aggregate)"""
    top_k = {
        "k": st.integers(1, 16),
        "chunk": st.sampled_from([16, 64, 1024]),
        "values": st.sampled_from(["bf16", "fp32", "sign"]),
        "indices": st.sampled_from(["auto", "u16", "gap8"]),
        "dense_below": st.sampled_from([0, 100]),
    }
    schemes = st.one_of(
        st.builds(Dense, values=st.sampled_from(["bf16", "fp32"])),
        st.builds(TopK, layout=st.sampled_from(["tiles", "flat"]), **top_k),
        st.builds(TopK, transform=st.just("dct"), update=st.sampled_from(["coefficients", "sign"]), **top_k),
    )
    shapes = st.sampled_from([(), (1,), (0,), (3, 0), (7, 5), (64, 32), (130,), (2, 3, 4, 5, 2)])
    count = draw(st.integers(1, 5))
    entries = tuple(Entry(f"t{n}", draw(shapes), draw(schemes)) for n in range(count))
    manifest = Manifest("m", entries)
    absent = draw(st.sets(st.integers(0, count - 1)))
    aggregate, zeros = draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 0.6, 1.0]))
    workers = draw(st.integers(1, 3))
    tensors = mean(manifest, workers, absent, zeros) if aggregate else contribution(manifest, 5, absent, zeros)
    return manifest, tensors, aggregate


@settings(deadline=None)
@given(streams(), st.booleans())
def test_tensors_survive_the_wire(stream, packed):
    manifest, tensors, aggregate = stream
    parts, commit = sent(tensors, manifest, packed=packed)
    assert read(parts, commit, manifest, absent=absent_positions(tensors), aggregate=aggregate) == tensors


@settings(deadline=None)
@given(streams(), st.booleans())
def test_the_commit_is_that_of_the_unpacked_bytes(stream, packed):
    manifest, tensors, _ = stream
    parts, commit = sent(tensors, manifest, packed=packed)
    crc32, size = 0, 0
    for part in parts:
        for field in unpacked(part, width_of(part, manifest)):
            crc32, size = zlib.crc32(field, crc32), size + len(field)
    assert (commit.parts, commit.payload_bytes, commit.crc32) == (len(parts), size, crc32)


@settings(deadline=None)
@given(streams())
def test_a_part_is_packed_just_where_that_is_shorter(stream):
    manifest, tensors, _ = stream
    for part in sent(tensors, manifest)[0]:
        width = width_of(part, manifest)
        values, *rest = unpacked(part, width)
        deflate = zstandard.ZstdCompressor(level=3).compress
        fields = [*(values[plane::width] for plane in range(width)), *rest]
        packed = sum(len(deflate(field)) for field in fields if field)
        plain = sum(map(len, fields))
        assert (part.packing == pb.PACKING_ZSTD) == (packed < plain)
        travelled = sum(map(len, (*part.values, part.scales, part.counts, part.indices)))
        assert travelled == min(packed, plain)


def test_unpacked_parts_hold_the_codecs_bytes():
    tensors = contribution()
    parts, _ = sent(tensors, packed=False)
    assert {part.packing for part in parts} == {pb.PACKING_NONE}
    for number, encoded in enumerate(tensors):
        own = [part for part in parts if part.tensor == number]
        assert b"".join(part.values[0] for part in own) == encoded.values
        assert b"".join(part.scales for part in own) == encoded.scales
        assert b"".join(part.indices for part in own) == encoded.indices


def test_parts_are_in_manifest_order_and_whole():
    parts, _ = sent(contribution())
    assert [(part.tensor, part.form, part.first, part.count) for part in parts] == [
        (0, pb.FORM_U16, 0, 8),
        (1, pb.FORM_DENSE, 0, 50),
        (3, pb.FORM_DENSE, 0, 1),
        (4, pb.FORM_GAP8, 0, 2),
        (5, pb.FORM_U8, 0, 8),
        (6, pb.FORM_U8, 0, 15),
    ]


LARGE = Manifest(
    "large",
    (
        Entry("dense", (600_000,), Dense("bf16")),
        Entry("exact", (300, 1000), Dense("fp32")),
        Entry("sparse", (1024, 512), TopK(k=2048, chunk=4096, dense_below=0)),
        Entry("chunks", (5 * 32_768 + 77,), TopK(k=32_768, chunk=32_768, layout="flat", values="fp32", dense_below=0)),
    ),
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("aggregate", [False, True])
def test_large_tensors_travel_in_parts_of_at_most_512_kib(packed, aggregate):
    tensors = mean(LARGE, 2) if aggregate else contribution(LARGE)
    parts, commit = sent(tensors, LARGE, packed=packed)
    ends = {}
    for part in parts:
        assert part.first == ends.get(part.tensor, 0)  # without gap or overlap
        ends[part.tensor] = part.first + part.count
        size = sum(map(len, unpacked(part, width_of(part, LARGE))))
        assert size <= PART_BYTES
        assert part.ByteSize() <= PART_BYTES + 1024
    assert [part.tensor for part in parts] == sorted(part.tensor for part in parts)
    assert ends[0] == 600_000
    assert len([part for part in parts if part.tensor == 0]) == 3  # 1,200,000 bytes
    assert len([part for part in parts if part.tensor == 1]) == 3
    assert read(parts, commit, LARGE, aggregate=aggregate) == tensors


SIGNS = Manifest(
    "signs",
    (
        Entry("contribution", (512_000,), sparse(256, 256, values="sign", indices="u8")),  # 290 bytes a chunk
        Entry("update", (2048, 2112), TopK(transform="dct", update="sign")),  # 514 bytes a chunk
    ),
)


@pytest.mark.parametrize("packed", [False, True])
def test_large_tensors_of_signs_travel_in_parts_of_at_most_512_kib(packed):
    random = np.random.default_rng(0)
    scales = (np.arange(2000) // 40).astype("<u2").tobytes()
    indices = np.tile(np.arange(256, dtype=np.uint8), 2000).tobytes()
    contributed = Encoded(Form.U8, random.bytes(2000 * 32), indices, scales=scales)
    update = Encoded(Form.SIGN, random.bytes(1056 * 512), counts=np.full(1056, 4096, "<u2").tobytes())
    for number, (tensor, chunks) in enumerate(((contributed, [1807, 193]), (update, [1020, 36]))):
        tensors = [tensor if position == number else None for position in range(2)]
        parts, commit = sent(tensors, SIGNS, packed=packed)
        assert [part.count for part in parts] == chunks  # 524288 / 290 and 524288 / 514 in the first
        assert all(sum(map(len, unpacked(part, 1))) <= PART_BYTES for part in parts)
        assert read(parts, commit, SIGNS, absent=[1 - number], aggregate=number == 1) == tensors


def test_an_update_of_nothing_travels_as_counts_alone():
    tensors = mean(zeros=1.0)
    part = sent(tensors, packed=False)[0][-1]
    assert (part.form, list(part.values), part.counts, part.indices) == (pb.FORM_SIGN, [b""], bytes(30), b"")
    for packed in (True, False):
        parts, commit = sent(tensors, packed=packed)
        assert read(parts, commit, aggregate=True) == tensors


def test_absent_is_not_zero():
    tensors = contribution(absent={1, 4})
    assert absent_positions(tensors) == [1, 4]
    parts, commit = sent(tensors)
    assert {part.tensor for part in parts} == {0, 3, 5, 6}
    assert read(parts, commit, absent=[1, 4]) == tensors


def test_an_empty_tensor_may_be_absent_too():
    tensors = contribution(absent={2})
    parts, commit = sent(tensors)
    assert read(parts, commit, absent=[2])[2] is None


def test_an_empty_tensor_travels_as_nothing_but_is_there():
    tensors = contribution()
    parts, commit = sent(tensors)
    assert 2 not in {part.tensor for part in parts}
    assert read(parts, commit)[2] == Encoded(Form.DENSE, b"")


def test_all_absent_is_a_stream_of_nothing():
    parts, commit = sent([None] * 7)
    assert (parts, commit) == ([], pb.Commit(parts=0, payload_bytes=0, crc32=0))
    assert read(parts, commit, absent=range(7)) == [None] * 7


def test_the_readers_tally_is_the_senders():
    tally = Tally()
    parts = list(write_parts(MANIFEST, contribution(), tally))
    reader = PartReader(MANIFEST, absent=(), aggregate=False)
    for part in parts:
        reader.add(part)
    assert reader.tally == tally
    fields = [field for part in parts for field in (*part.values, part.scales, part.counts, part.indices)]
    assert tally.wire_bytes == sum(map(len, fields))


# Wrong ones


def refusal(parts, commit=None, *, manifest=MANIFEST, absent=(), aggregate=False):
    """Why a stream is refused."""
    with pytest.raises(MalformedTensor) as caught:
        read(parts, commit or pb.Commit(), manifest, absent=absent, aggregate=aggregate)
    return str(caught.value)


@pytest.fixture
def plain():
    """The parts of a contribution, unpacked, and their commit."""
    return sent(contribution(), packed=False)


def test_the_stream_that_the_wrong_ones_are_made_of_is_right(plain):
    assert read(*plain) == contribution()


PACKED, COMMIT = sent(contribution())
PLAIN = sent(contribution(), packed=False)[0]


@settings(max_examples=400, deadline=None)
@given(st.data(), st.booleans())
def test_a_flipped_bit_is_noticed(data, packed):
    parts = [pb.Part.FromString(part.SerializeToString()) for part in (PACKED if packed else PLAIN)]
    which = data.draw(st.integers(0, len(parts) - 1))
    raw = bytearray(parts[which].SerializeToString())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    try:
        parts[which] = pb.Part.FromString(bytes(raw))
    except DecodeError:
        return
    try:
        tensors = read(parts, COMMIT)
    except MalformedTensor:
        return
    assert tensors == contribution()  # a bit without meaning, such as one of an unknown field


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_a_truncated_field_is_noticed(data, packed):
    parts = [pb.Part.FromString(part.SerializeToString()) for part in (PACKED if packed else PLAIN)]
    part = data.draw(st.sampled_from(parts))
    fields = [*range(len(part.values)), *(name for name in ("indices", "scales") if getattr(part, name))]
    field = data.draw(st.sampled_from(fields))
    whole = part.values[field] if isinstance(field, int) else getattr(part, field)
    short = whole[: data.draw(st.integers(0, len(whole) - 1))]
    if isinstance(field, int):
        part.values[field] = short
    else:
        setattr(part, field, short)
    assert MANIFEST.entries[part.tensor].name in refusal(parts, COMMIT)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_a_part_of_random_content_is_a_malformed_tensor_or_fine(data, aggregate):
    numbers = st.integers(0, 10) | st.sampled_from([2**31, 2**32 - 1])
    wide = st.integers(0, 10) | st.sampled_from([2**31, 2**63, 2**64 - 1])
    frames = st.binary(max_size=40) | st.binary(max_size=40).map(zstandard.ZstdCompressor().compress)
    part = pb.Part(
        tensor=data.draw(st.integers(0, 8)),
        form=data.draw(st.integers(0, 8)),
        first=data.draw(st.just(0) | wide),
        count=data.draw(wide),
        packing=data.draw(st.integers(0, 3)),
        values=data.draw(st.lists(frames, max_size=5)),
        scales=data.draw(st.just(b"") | frames),
        counts=data.draw(frames),
        indices=data.draw(frames),
    )
    commit = pb.Commit(parts=data.draw(numbers), payload_bytes=data.draw(wide), crc32=data.draw(numbers))
    absent = data.draw(st.sampled_from([(), (0,), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5)]))
    with pytest.raises(MalformedTensor):
        read([part], commit, absent=absent, aggregate=aggregate)


@settings(deadline=None)
@given(st.permutations(range(len(PLAIN))).filter(lambda order: order != sorted(order)))
def test_parts_out_of_order_are_refused(order):
    text = refusal([PLAIN[number] for number in order], COMMIT)
    assert any(entry.name in text for entry in MANIFEST)


@given(st.integers(0, len(PLAIN) - 1))
def test_a_repeated_part_is_refused(which):
    parts = [*PLAIN[: which + 1], *PLAIN[which:]]
    assert MANIFEST.entries[PLAIN[which].tensor].name in refusal(parts, COMMIT)


@given(st.integers(0, len(PLAIN) - 1))
def test_a_missing_part_is_refused(which):
    text = refusal([*PLAIN[:which], *PLAIN[which + 1 :]], COMMIT)
    assert any(entry.name in text for entry in MANIFEST)


def test_a_tensor_that_never_came_is_named(plain):
    parts, commit = plain
    assert refusal(parts[:-1], commit) == "the commit came before update"
    assert refusal(parts[:-3], commit) == "the commit came before gaps"
    assert refusal([], commit) == "the commit came before weight"


def test_a_tensor_that_ends_early_is_the_one_that_is_named():
    parts, commit = sent(contribution(LARGE), LARGE)
    last = max(number for number, part in enumerate(parts) if part.tensor == 0)
    text = refusal(parts[:last] + parts[last + 1 :], commit, manifest=LARGE)
    assert text.startswith("dense: ")
    assert "of 600000" in text


def test_a_part_of_an_absent_tensor_is_refused(plain):
    assert refusal(*plain, absent=[1]).startswith("bias: a part out of order")


def test_a_part_of_an_empty_tensor_is_refused(plain):
    parts, commit = plain
    empty = pb.Part(tensor=2, form=pb.FORM_DENSE, count=1, packing=pb.PACKING_NONE, values=[b""])
    assert refusal([*parts[:2], empty, *parts[2:]], commit).startswith("empty: ")


def changed(parts, which, **fields):
    """Copies of the parts, one of them changed."""
    copies = [pb.Part.FromString(part.SerializeToString()) for part in parts]
    for name, value in fields.items():
        if name == "values":
            copies[which].ClearField("values")
            copies[which].values.extend(value)
        else:
            setattr(copies[which], name, value)
    return copies


U16 = np.frombuffer(PLAIN[0].indices, "<u2")
BF16 = PLAIN[0].values[0]
SIGN_BITS, SCALES = PLAIN[4].values[0], PLAIN[4].scales


def u16(at, value):
    indices = U16.copy()
    indices[at] = value
    return indices.tobytes()


@pytest.mark.parametrize(
    ("which", "fields", "words"),
    [
        (0, {"form": 0}, "weight: form 0 is unknown"),
        (0, {"form": 77}, "weight: form 77 is unknown"),
        (0, {"form": pb.FORM_DENSE}, "weight: form DENSE in a contribution"),
        (0, {"form": pb.FORM_U8}, "weight: form U8 in a contribution"),
        (0, {"form": pb.FORM_GAP8}, "weight: form GAP8 in a contribution"),
        (0, {"form": pb.FORM_BITMAP}, "weight: form BITMAP in a contribution"),
        (1, {"form": pb.FORM_U16}, "bias: form U16 in a contribution"),
        (0, {"packing": 0}, "weight: packing 0 is unknown"),
        (0, {"packing": 3}, "weight: packing 3 is unknown"),
        (0, {"tensor": 7}, "a part is of tensor 7, and the manifest has 7"),
        (0, {"tensor": 2**32 - 1}, "a part is of tensor 4294967295"),
        (0, {"tensor": 3}, "scalar: a part out of order"),
        (0, {"first": 1}, "weight: "),
        (0, {"count": 9}, "weight: chunks 0 to 8 of a tensor that has 8 chunks"),
        (0, {"count": 2**64 - 1}, "weight: "),
        (0, {"first": 2**64 - 1}, "weight: "),
        (0, {"count": 0}, "weight: chunks"),
        (0, {"count": 7}, "weight: "),
        (1, {"count": 51}, "bias: elements 0 to 50 of a tensor that has 50 elements"),
        (1, {"count": 49}, "bias: "),
        (0, {"counts": b"\x08\x00" * 8}, "weight: a contribution with counts per chunk"),
        (1, {"counts": b"\x08\x00"}, "bias: a dense tensor with counts"),
        (1, {"indices": b"\x00"}, "bias: a field has 1 bytes where at most 0 can be"),
        (0, {"values": []}, "weight: values come in 0 pieces, 1 are meant"),
        (0, {"values": [BF16[:50], BF16[50:]]}, "weight: values come in 2 pieces, 1 are meant"),
        (0, {"values": [BF16 + b"\x00\x00"]}, "weight: a field has"),
        (0, {"values": [BF16[:-2]]}, "weight: 124 bytes of values; there should be 126"),
        (0, {"values": [BF16[:-1]]}, "weight: 125 bytes of values; there should be 126"),
        (0, {"values": [BF16[:-2] + b"\xc0\x7f"]}, "weight: 1 of 63 values are not finite"),
        (0, {"values": [b"\x80\xff" + BF16[2:-2] + b"\x80\x7f"]}, "weight: 2 of 63 values are not finite"),
        (1, {"values": [struct.pack("<50f", *[1.0] * 49, float("nan"))]}, "bias: 1 of 50 values are not finite"),
        (1, {"values": [struct.pack("<50f", float("-inf"), *[1.0] * 49)]}, "bias: 1 of 50 values are not finite"),
        (0, {"indices": u16(7, 256)}, "weight: index 256 of chunk 0 is out of range: it has 256"),
        (0, {"indices": u16(62, 208)}, "weight: index 208 of chunk 7 is out of range: it has 208"),
        (0, {"indices": u16(62, 65535)}, "weight: index 65535 of chunk 7 is out of range"),
        (0, {"indices": u16(1, U16[0])}, "weight: the indices of chunk 0 don't ascend"),
        (0, {"indices": u16(24, 255)}, "weight: the indices of chunk 3 don't ascend"),
        (0, {"indices": U16.tobytes() + b"\x00\x00"}, "weight: a field has 128 bytes where at most 126 can be"),
        (0, {"indices": U16[:-1].tobytes()}, "weight: the indices end early, in chunk 7"),
        (3, {"indices": b"\xff" * 8}, "gaps: the indices end early"),
        (3, {"indices": b"\x00" * 9}, "gaps: 1 bytes of indices left over"),
        (3, {"indices": b"\xff\xff\x02" + b"\x00" * 7}, "gaps: "),
        (0, {"scales": SCALES}, "weight: a field has 16 bytes where at most 0 can be"),
        (1, {"scales": b"\x00"}, "bias: a field has 1 bytes where at most 0 can be"),
        (4, {"scales": b""}, "signs: 0 bytes of scales; there should be 16"),
        (4, {"scales": SCALES[:-2]}, "signs: 14 bytes of scales; there should be 16"),
        (4, {"scales": SCALES + SCALES[:2]}, "signs: a field has 18 bytes where at most 16 can be"),
        (4, {"scales": SCALES[:-1] + bytes([SCALES[-1] | 0x80])}, "signs: a scale is negative or not finite"),
        (4, {"scales": b"\x00\x80" + SCALES[2:]}, "signs: a scale is negative or not finite"),
        (4, {"scales": b"\x80\x7f" + SCALES[2:]}, "signs: a scale is negative or not finite"),
        (4, {"scales": SCALES[:-2] + b"\xc0\x7f"}, "signs: a scale is negative or not finite"),
        (4, {"values": [SIGN_BITS[:-1]]}, "signs: 14 bytes of values; there should be 15"),
        (4, {"values": [SIGN_BITS + b"\x00"]}, "signs: a field has 16 bytes where at most 15 can be"),
        (4, {"values": [SIGN_BITS[:7], SIGN_BITS[7:]]}, "signs: values come in 2 pieces, 1 are meant"),
        (4, {"values": [b"\x00\x02" + SIGN_BITS[2:]]}, "signs: spare bits are set after the signs of a chunk"),
        (4, {"values": [b"\x00\x80" + SIGN_BITS[2:]]}, "signs: spare bits are set after the signs of a chunk"),
        (4, {"counts": b"\x09\x00" * 7 + b"\x08\x00"}, "signs: a contribution with counts per chunk"),
        (4, {"form": pb.FORM_SIGN}, "signs: form SIGN in a contribution: allowed here is U8"),
        (5, {"form": pb.FORM_SIGN}, "update: form SIGN in a contribution: allowed here is U8, U16, GAP8"),
    ],
)
def test_a_wrong_part_is_refused_with_its_tensor_and_the_reason(plain, which, fields, words):
    parts, commit = plain
    assert refusal(changed(parts, which, **fields), commit).startswith(words)
    assert leaves_nothing_behind(parts, commit, which, changed(parts, which, **fields)[which]) == contribution()


def leaves_nothing_behind(parts, commit, which, wrong, *, aggregate=False):
    """What a reader makes of a stream in which a wrong part came, and was refused, before one of the right ones."""
    reader = PartReader(MANIFEST, absent=(), aggregate=aggregate)
    for number, part in enumerate(parts):
        if number == which:
            with pytest.raises(MalformedTensor):
                reader.add(wrong)
        reader.add(part)
    return reader.finish(commit)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parts": 3}, "parts = 3, but what arrived has 6"),
        ({"parts": 0}, "parts = 0, but what arrived has 6"),
        ({"payload_bytes": 1}, "payload_bytes = 1, but what arrived has"),
        ({"crc32": 0}, "crc32 = 0, but what arrived has"),
    ],
)
def test_a_commit_that_does_not_fit_is_refused(plain, change, words):
    parts, commit = plain
    for name, value in change.items():
        setattr(commit, name, value)
    assert f"the commit says {words}" in refusal(parts, commit)


@given(st.integers(0, 31))
def test_a_crc_with_any_bit_wrong_is_refused(bit):
    commit = pb.Commit(parts=COMMIT.parts, payload_bytes=COMMIT.payload_bytes, crc32=COMMIT.crc32 ^ (1 << bit))
    assert "crc32" in refusal(PACKED, commit)


@pytest.mark.parametrize("absent", [[1, 0], [1, 1], [7], [0, 2**32 - 1]])
def test_a_wrong_list_of_absent_tensors_is_refused(absent):
    with pytest.raises(MalformedTensor, match="not ascending, or longer than the manifest"):
        PartReader(MANIFEST, absent=absent, aggregate=False)


def test_a_form_that_changes_within_a_tensor_is_refused():
    manifest = Manifest("m", (Entry("w", (1024,), sparse(2, 256)),))
    encoded = codec.encode(torch.randn(1024), manifest.entries[0].scheme)
    u8 = pb.Part(form=pb.FORM_U8, count=2, packing=pb.PACKING_NONE, values=[encoded.values[:8]], indices=b"\1\2\1\2")
    two_bytes = b"\1\0\2\0" * 2
    u16_ = pb.Part(
        form=pb.FORM_U16, first=2, count=2, packing=pb.PACKING_NONE, values=[encoded.values[8:]], indices=two_bytes
    )
    assert refusal([u8, u16_], manifest=manifest).startswith("w: a piece in form U16 of a tensor that began in form U8")


# Aggregates


def test_an_aggregate_is_not_a_contribution_and_the_reverse():
    parts, commit = sent(mean())
    assert refusal(parts, commit, aggregate=False).startswith("weight: form GAP8 in a contribution")
    parts, commit = sent(contribution())
    assert refusal(parts, commit, aggregate=True).startswith("weight: form U16 in an aggregate")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (b"", "weight: 0 bytes of counts for 8 chunks"),
        (b"\x08\x00" * 7, "weight: 14 bytes of counts for 8 chunks"),
        (b"\x08\x00" * 7 + b"\x06\x00", "weight: chunk 7 with a count of 6: possible are 7"),
        (b"\x00\x00" + b"\x08\x00" * 6 + b"\x07\x00", "weight: chunk 0 with a count of 0: possible are 8"),
        (b"\xff\xff" * 8, "weight: chunk 0 with a count of 65535: possible are 8 (sent by one worker) to 256"),
        (b"\x00" * (PART_BYTES + 1), "weight: a field has 524289 bytes where at most 524288 can be"),
    ],
)
def test_counts_that_can_not_be_are_refused(counts, words):
    parts, commit = sent(mean(), packed=False)
    assert refusal(changed(parts, 0, counts=counts), commit, aggregate=True).startswith(words)


MEAN, MEAN_COMMIT = sent(mean(), packed=False)
UPDATE = MEAN[5].values[0]


@pytest.mark.parametrize(
    ("which", "fields", "words"),
    [
        (0, {"form": pb.FORM_SIGN}, "weight: form SIGN in an aggregate: allowed here is GAP8, BITMAP, DENSE"),
        (1, {"form": pb.FORM_SIGN}, "bias: form SIGN in an aggregate: allowed here is DENSE"),
        (4, {"form": pb.FORM_SIGN}, "signs: form SIGN in an aggregate: allowed here is GAP8, BITMAP, DENSE"),
        (4, {"scales": SCALES}, "signs: a field has 16 bytes where at most 0 can be"),
        (5, {"form": pb.FORM_BITMAP}, "update: form BITMAP in an aggregate: allowed here is SIGN"),
        (5, {"form": pb.FORM_GAP8}, "update: form GAP8 in an aggregate: allowed here is SIGN"),
        (5, {"form": pb.FORM_DENSE}, "update: form DENSE in an aggregate: allowed here is SIGN"),
        (5, {"form": pb.FORM_U8}, "update: form U8 in an aggregate: allowed here is SIGN"),
        (5, {"counts": b""}, "update: 0 bytes of counts for 15 chunks"),
        (5, {"counts": b"\x15\x00" * 14}, "update: 28 bytes of counts for 15 chunks"),
        (5, {"counts": b"\x15\x00" * 14 + b"\x14\x00"}, "update: chunk 14 with a count of 20: possible are 0 or 21"),
        (5, {"counts": b"\x03\x00" * 15}, "update: chunk 0 with a count of 3: possible are 0 or 21 (its length)"),
        (5, {"counts": b"\xff\xff" * 15}, "update: chunk 0 with a count of 65535: possible are 0 or 21"),
        (5, {"counts": b"\x15\x00" * 14 + bytes(2)}, "update: a field has 45 bytes where at most 42 can be"),
        (5, {"counts": bytes(30)}, "update: a field has 45 bytes where at most 0 can be"),
        (5, {"indices": b"\x00"}, "update: a field has 1 bytes where at most 0 can be"),
        (5, {"scales": SCALES}, "update: a field has 16 bytes where at most 0 can be"),
        (5, {"values": []}, "update: values come in 0 pieces, 1 are meant"),
        (5, {"values": [UPDATE[:-1]]}, "update: 44 bytes of values; there should be 45"),
        (5, {"values": [UPDATE[:2] + b"\x20" + UPDATE[3:]]}, "update: spare bits are set after the signs of a chunk"),
        (5, {"values": [UPDATE[:-1] + b"\x80"]}, "update: spare bits are set after the signs of a chunk"),
    ],
)
def test_a_wrong_part_of_signs_in_an_aggregate_is_refused(which, fields, words):
    wrong = changed(MEAN, which, **fields)
    assert refusal(wrong, MEAN_COMMIT, aggregate=True).startswith(words)
    assert leaves_nothing_behind(MEAN, MEAN_COMMIT, which, wrong[which], aggregate=True) == mean()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_bit_in_an_aggregate_is_noticed(data):
    tensors = mean()
    parts, commit = sent(tensors, packed=data.draw(st.booleans()))
    which = data.draw(st.integers(0, len(parts) - 1))
    raw = bytearray(parts[which].SerializeToString())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    try:
        parts[which] = pb.Part.FromString(bytes(raw))
        assert read(parts, commit, aggregate=True) == tensors
    except (DecodeError, MalformedTensor):
        return


# Bombs


def peak_of(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BOMB = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))


@pytest.mark.parametrize("field", ["low plane", "high plane", "counts", "indices"])
@pytest.mark.parametrize("aggregate", [False, True])
def test_a_bomb_in_any_field_is_refused_without_being_unpacked(field, aggregate):
    deflate = zstandard.ZstdCompressor().compress
    (part,) = (part for part in sent(mean() if aggregate else contribution(), packed=False)[0] if part.tensor == 0)
    fields = {
        "packing": pb.PACKING_ZSTD,
        "values": [deflate(part.values[0][plane::2]) for plane in range(2)],
        "counts": deflate(part.counts) if part.counts else b"",
        "indices": deflate(part.indices),
    }
    PartReader(MANIFEST, absent=(), aggregate=aggregate).add(changed([part], 0, **fields)[0])
    if field in fields:
        fields[field] = BOMB
    else:
        fields["values"][["low plane", "high plane"].index(field)] = BOMB
    (bomb,) = changed([part], 0, **fields)
    assert refusal([bomb], aggregate=aggregate).startswith("weight: ")
    assert peak_of(lambda: refusal([bomb], aggregate=aggregate)) < 1 << 20


@pytest.mark.parametrize(
    ("number", "field", "aggregate"),
    [
        *((5, field, False) for field in ("plane", "scales", "counts", "indices")),
        *((6, field, True) for field in ("plane", "scales", "counts", "indices")),
        (0, "scales", False),
        (0, "scales", True),
    ],
)
def test_a_bomb_among_signs_is_refused_without_being_unpacked(number, field, aggregate):
    others = [n for n in range(7) if n != number]
    deflate = zstandard.ZstdCompressor().compress
    (part,) = (part for part in sent(mean() if aggregate else contribution(), packed=False)[0] if part.tensor == number)
    width = width_of(part)
    rest = {name: getattr(part, name) for name in ("scales", "counts", "indices")}
    fields = {name: deflate(value) for name, value in rest.items() if value}
    fields |= {"packing": pb.PACKING_ZSTD, "values": [deflate(part.values[0][plane::width]) for plane in range(width)]}
    PartReader(MANIFEST, absent=others, aggregate=aggregate).add(changed([part], 0, **fields)[0])
    fields |= {"values": [BOMB, *fields["values"][1:]]} if field == "plane" else {field: BOMB}
    (bomb,) = changed([part], 0, **fields)
    text = refusal([bomb], absent=others, aggregate=aggregate)
    tensor = MANIFEST.entries[number].name
    assert text.startswith(f"{tensor}: a packed field claims 67108864 bytes where at most ")
    assert peak_of(lambda: refusal([bomb], absent=others, aggregate=aggregate)) < 1 << 20


def test_scales_that_claim_one_byte_more_than_the_chunks_have_are_refused_unread():
    deflate = zstandard.ZstdCompressor().compress
    header = deflate(bytes(17))[:6]  # what the frame claims, without any content: there is nothing else to look at
    fields = {"values": [deflate(SIGN_BITS)], "indices": deflate(PLAIN[4].indices), "scales": header}
    (wrong,) = changed(PLAIN[4:5], 0, packing=pb.PACKING_ZSTD, **fields)
    text = refusal([wrong], absent=[0, 1, 2, 3, 4, 6])
    assert text == "signs: a packed field claims 17 bytes where at most 16 can be"


def test_a_contribution_has_no_counts_not_even_packed_nothing():
    parts, commit = sent(contribution())
    packed_nothing = zstandard.ZstdCompressor().compress(b"")
    assert refusal(changed(parts, 0, counts=packed_nothing + b"x" * 100_000), commit).startswith("weight: ")


def test_a_part_over_512_kib_is_refused_before_it_is_unpacked():
    count = PART_BYTES // 2 + 1
    frames = [zstandard.ZstdCompressor().compress(bytes(count))] * 2
    part = pb.Part(form=pb.FORM_DENSE, count=count, packing=pb.PACKING_ZSTD, values=frames)
    assert peak_of(lambda: refusal([part], manifest=LARGE)) < 256 * 1024
    assert refusal([part], manifest=LARGE).startswith("dense: ")
    assert "524288" in refusal([part], manifest=LARGE)


def test_a_part_over_512_kib_with_its_indices_is_refused():
    manifest = Manifest("m", (Entry("w", (1 << 20,), sparse(256, 256, indices="u16")),))
    chunks = 1000  # 512,000 bytes of values, as many of indices
    indices = np.tile(np.arange(256, dtype="<u2"), chunks).tobytes()
    part = pb.Part(form=pb.FORM_U16, count=chunks, packing=pb.PACKING_NONE, values=[bytes(512_000)], indices=indices)
    assert refusal([part], manifest=manifest).startswith("w: a part is over the 524288 bytes of payload allowed")


def test_a_part_that_claims_very_many_chunks_costs_nothing():
    manifest = Manifest("m", (Entry("w", (1 << 26,), sparse(4, 64)),))
    part = pb.Part(form=pb.FORM_U8, count=1 << 20, packing=pb.PACKING_NONE, values=[b""])
    assert peak_of(lambda: refusal([part], manifest=manifest)) < 4 << 20
