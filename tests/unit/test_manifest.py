"""The manifest: one fingerprint on every machine, and the first difference in words."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.codec import Dense, TopK
from gradwire.errors import ManifestMismatch, ProtocolError
from gradwire.manifest import Entry, Manifest, Role
from gradwire.v1 import tensors_pb2 as pb
from gradwire.wire.schemas import entry_batches, entry_from_message, entry_to_message

# Fixed runs, and the bytes that their fingerprints are of: they are a contract between versions.
PINNED = Manifest(
    "sparseloco",
    (
        Entry("layer.weight", (64, 128), TopK(k=64, chunk=4096, normalization="senders")),
        Entry("layer.bias", (64,), Dense("fp32")),
        Entry("norm.mean", (), Dense("bf16"), Role.BUFFER),
    ),
)

PINNED_BYTES = bytes.fromhex(
    "67726164776972652d6d616e69666573742d3100"  # gradwire-manifest-1
    "0a00 7370617273656c6f636f 03000000"
    "0c00 6c617965722e776569676874 01 02 4000000000000000 8000000000000000"  # layer.weight, 64 x 128
    "02 40000000 00100000 02 01 01 0010000000000000 02 01 01 01"
    "0a00 6c617965722e62696173 01 01 4000000000000000"  # layer.bias, 64
    "01 02"
    "09006e6f726d2e6d65616e 02 00"  # norm.mean
    "01 01"
)
PINNED_DEMO = Manifest(
    "demo",
    (
        Entry(
            "w",
            (96, 64),
            TopK(
                k=32,
                chunk=1024,
                transform="dct",
                values="sign",
                indices="gap8",
                dense_below=300,
                normalization="senders",
                update="sign",
                clip="median",
            ),
        ),
        Entry("v", (9,), TopK(k=1, chunk=9, transform="dct", values="fp32", indices="u8", dense_below=0)),
    ),
)
PINNED_DEMO_BYTES = bytes.fromhex(
    "67726164776972652d6d616e69666573742d3100 0400 64656d6f 02000000"
    "0100 77 01 02 6000000000000000 4000000000000000"  # w, 96 x 64
    "02 20000000 00040000 02 03 04 2c01000000000000 02 02 02 02"
    "0100 76 01 01 0900000000000000"  # v, 9
    "02 01000000 09000000 02 02 02 0000000000000000 01 02 01 01"
)

TOP_K = st.fixed_dictionaries(
    {
        "k": st.integers(1, 64),
        "chunk": st.sampled_from([64, 256]),
        "values": st.sampled_from(["bf16", "fp32", "sign"]),
        "indices": st.sampled_from(["auto", "u8", "u16", "gap8"]),
        "dense_below": st.integers(0, 2**64 - 1),
        "normalization": st.sampled_from(["contributors", "senders"]),
        "clip": st.sampled_from([None, "median"]),
    }
)
HOW = st.fixed_dictionaries({"layout": st.sampled_from(["tiles", "flat"])}) | st.fixed_dictionaries(
    {"transform": st.just("dct"), "update": st.sampled_from(["coefficients", "sign"])}
)
SCHEMES = st.one_of(
    st.builds(Dense, values=st.sampled_from(["bf16", "fp32"])),
    st.builds(lambda fields, how: TopK(**fields, **how), TOP_K, HOW),
)
ENTRIES = st.builds(
    Entry,
    name=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    shape=st.lists(st.integers(0, 64), max_size=5).map(tuple),
    scheme=SCHEMES,
    role=st.sampled_from(Role),
)
MANIFESTS = st.builds(
    Manifest,
    method=st.sampled_from(["sparseloco", "gradients:AdamW", "größe"]),
    entries=st.lists(ENTRIES, max_size=6, unique_by=lambda entry: entry.name).map(tuple),
)


def recomputed(manifest: Manifest) -> bytes:
    """The fingerprint, from the layout: numbers little-endian, texts with a u16 length, numbers of the wire's enums."""

    def text(value):
        return struct.pack("<H", len(value.encode("utf-8"))) + value.encode("utf-8")

    data = b"gradwire-manifest-1\x00" + text(manifest.method) + struct.pack("<I", len(manifest.entries))
    for entry in manifest.entries:
        message = entry_to_message(entry)
        data += text(entry.name) + bytes([message.role, len(entry.shape)])
        for size in entry.shape:
            data += struct.pack("<Q", size)
        if isinstance(entry.scheme, Dense):
            data += bytes([1, message.scheme.dense.values])
        else:
            top_k = message.scheme.top_k
            data += b"\x02" + struct.pack("<I", top_k.k) + struct.pack("<I", top_k.chunk)
            data += bytes([top_k.layout, top_k.values, top_k.indices])
            data += struct.pack("<Q", top_k.dense_below)
            data += bytes([top_k.normalization, top_k.transform, top_k.update, top_k.clip])
    return hashlib.sha256(data).digest()


@settings(deadline=None)
@given(MANIFESTS)
def test_the_fingerprint_is_sha256_over_the_layout(manifest):
    assert manifest.fingerprint == recomputed(manifest)


@pytest.mark.parametrize(
    ("manifest", "data"), [(PINNED, PINNED_BYTES), (PINNED_DEMO, PINNED_DEMO_BYTES)], ids=["sparseloco", "demo"]
)
def test_the_fingerprint_is_pinned(manifest, data):
    assert manifest.fingerprint == recomputed(manifest)
    assert manifest.fingerprint == hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    ("change", "before"),
    [
        ({"transform": "dct"}, {}),
        ({"update": "sign"}, {"transform": "dct"}),
        ({"clip": "median"}, {}),
        ({"clip": "median"}, {"transform": "dct", "update": "sign"}),
        ({"values": "sign"}, {}),
        ({"values": "sign"}, {"values": "fp32", "transform": "dct"}),
    ],
)
def test_what_is_done_to_the_values_is_part_of_the_fingerprint(change, before):
    one, other = (Manifest("m", (Entry("w", (8, 8), TopK(**fields)),)) for fields in (before, before | change))
    assert one.fingerprint != other.fingerprint
    ((field, value),) = change.items()
    with pytest.raises(ManifestMismatch, match=f"w: TopK.* here, TopK.*{field}='{value}'.* in the run"):
        one.require_same(other)


@settings(deadline=None)
@given(MANIFESTS, MANIFESTS)
def test_manifests_differ_just_when_their_fingerprints_do(one, other):
    assert (one.fingerprint == other.fingerprint) == (one == other)
    if one == other:
        one.require_same(other)
    else:
        with pytest.raises(ManifestMismatch):
            one.require_same(other)


@settings(deadline=None)
@given(ENTRIES)
def test_an_entry_survives_its_message(entry):
    message = pb.ManifestEntry.FromString(entry_to_message(entry).SerializeToString())
    assert entry_from_message(message) == entry


def test_entries_travel_in_messages_of_at_most_512():
    manifest = Manifest("m", tuple(Entry(f"t{n}", (1,), Dense()) for n in range(1030)))
    batches = list(entry_batches(manifest))
    assert [len(batch) for batch in batches] == [512, 512, 6]
    assert tuple(entry_from_message(message) for batch in batches for message in batch) == manifest.entries


WEIGHT = Entry("w", (64, 32), TopK(k=8, chunk=256))
BIAS = Entry("b", (32,), Dense())


@pytest.mark.parametrize(
    ("here", "run", "words"),
    [
        (("demo", WEIGHT), ("sparseloco", WEIGHT), "method: demo here, sparseloco in the run"),
        (("m", WEIGHT, BIAS), ("m", BIAS, WEIGHT), "tensor 'w' here, 'b' in its place in the run"),
        (
            ("m", BIAS, WEIGHT),
            ("m", BIAS, Entry("w", (64, 64), WEIGHT.scheme)),
            "w: [64, 32] here, [64, 64] in the run",
        ),
        (("m", Entry("w", (), Dense())), ("m", Entry("w", (1,), Dense())), "w: [] here, [1] in the run"),
        (
            ("m", Entry("b", (32,), Dense("fp32"))),
            ("m", BIAS),
            "b: Dense(values='fp32') here, Dense(values='bf16') in the run",
        ),
        (
            ("m", Entry("b", (32,), Dense(), Role.BUFFER)),
            ("m", BIAS),
            "b: buffer here, parameter in the run",
        ),
        (("m", WEIGHT, BIAS), ("m", WEIGHT), "b: [32] here, no such tensor in the run"),
        (("m", WEIGHT), ("m", WEIGHT, BIAS), "b: [32] in the run, no such tensor here"),
        (("m",), ("m", BIAS), "b: [32] in the run, no such tensor here"),
    ],
)
def test_the_first_difference_is_named(here, run, words):
    with pytest.raises(ManifestMismatch) as caught:
        Manifest(here[0], here[1:]).require_same(Manifest(run[0], run[1:]))
    assert str(caught.value) == f"this worker's model is not the run's. {words}"


def test_another_k_is_named():
    other = Entry("w", (64, 32), TopK(k=9, chunk=256))
    with pytest.raises(ManifestMismatch) as caught:
        Manifest("m", (WEIGHT,)).require_same(Manifest("m", (other,)))
    assert "w: TopK(k=8," in str(caught.value)
    assert "TopK(k=9," in str(caught.value)


def test_only_the_first_of_several_differences_is_named():
    with pytest.raises(ManifestMismatch) as caught:
        Manifest("m", (Entry("a", (1,), Dense()), Entry("b", (1,), Dense()))).require_same(
            Manifest("m", (Entry("a", (2,), Dense()), Entry("b", (2,), Dense())))
        )
    assert "a: [1] here, [2] in the run" in str(caught.value)
    assert "b:" not in str(caught.value)


def test_equal_manifests_are_the_same():
    PINNED.require_same(Manifest("sparseloco", tuple(PINNED)))


def test_a_name_that_stands_twice_is_refused():
    with pytest.raises(ProtocolError, match="names 'w' twice"):
        Manifest("m", (WEIGHT, BIAS, Entry("w", (1,), Dense())))


def test_parameters_are_the_elements_of_trained_tensors_alone():
    assert PINNED.parameters == 64 * 128 + 64
    assert Manifest("m", ()).parameters == 0
    assert Manifest("m", (Entry("s", (), Dense()), Entry("e", (0, 5), Dense()))).parameters == 1


@pytest.mark.parametrize("name", ["", "x" * 1025, "ä" * 513])
def test_a_name_has_1_to_1024_bytes(name):
    with pytest.raises(ProtocolError, match="1 to 1024 bytes"):
        Entry(name, (1,), Dense())


@pytest.mark.parametrize("name", ["x", "x" * 1024, "ä" * 512])
def test_names_up_to_the_bound_are_fine(name):
    assert Entry(name, (1,), Dense()).name == name


@pytest.mark.parametrize("shape", [(2**48,), (2**24, 2**24), (2**40, 2**40, 2**40), (1,) * 17])
def test_a_shape_over_its_bounds_is_refused(shape):
    with pytest.raises(ProtocolError, match=r"^w: shape .* too large"):
        Entry("w", shape, Dense())


@pytest.mark.parametrize("shape", [(2**48 - 1,), (70_000, 5), (2**40, 0), (1,) * 16, ()])
def test_a_shape_within_its_bounds_is_fine(shape):
    entry = Entry("w", shape, Dense())
    assert Manifest("m", (entry,)).fingerprint == recomputed(Manifest("m", (entry,)))


def test_a_manifest_of_too_many_tensors_is_refused(monkeypatch):
    monkeypatch.setattr("gradwire.manifest.MAX_TENSORS", 3)
    entries = tuple(Entry(f"t{n}", (1,), Dense()) for n in range(4))
    Manifest("m", entries[:3])
    with pytest.raises(ProtocolError, match="at most 3 tensors, this one has 4"):
        Manifest("m", entries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "role", 0), "w: role 0 is unknown"),
        (lambda m: setattr(m, "role", 9), "w: role 9 is unknown"),
        (lambda m: m.ClearField("scheme"), "w: its scheme is of a kind unknown here"),
        (lambda m: setattr(m.scheme.top_k, "layout", 7), "w: its scheme has the number 7 where one of"),
        (lambda m: setattr(m.scheme.top_k, "values", 0), "w: its scheme has the number 0 where one of"),
        (lambda m: setattr(m.scheme.top_k, "indices", 99), "w: its scheme has the number 99 where one of"),
        (lambda m: setattr(m.scheme.top_k, "normalization", 3), "w: its scheme has the number 3 where one of"),
        (lambda m: setattr(m.scheme.top_k, "transform", 0), "w: its scheme has the number 0 where one of"),
        (lambda m: setattr(m.scheme.top_k, "transform", 3), "w: its scheme has the number 3 where one of"),
        (lambda m: setattr(m.scheme.top_k, "update", 0), "w: its scheme has the number 0 where one of"),
        (lambda m: setattr(m.scheme.top_k, "update", 3), "w: its scheme has the number 3 where one of"),
        (lambda m: setattr(m.scheme.top_k, "update", 2), "w: TopK.update = 'sign' needs transform 'dct'"),
        (lambda m: setattr(m.scheme.top_k, "clip", 0), "w: its scheme has the number 0 where one of"),
        (lambda m: setattr(m.scheme.top_k, "clip", 3), "w: its scheme has the number 3 where one of"),
        (lambda m: m.scheme.top_k.MergeFrom(pb.TopKScheme(layout=1, transform=2)), "w: TopK.transform = 'dct' needs"),
        (lambda m: setattr(m.scheme.dense, "values", 5), "w: its scheme has the number 5 where one of"),
        (lambda m: setattr(m.scheme.dense, "values", 3), "w: its scheme has the number 3 where one of"),
        (lambda m: setattr(m.scheme.top_k, "k", 0), "w: TopK.k = 0"),
        (lambda m: setattr(m.scheme.top_k, "chunk", 2**31), "w: TopK.chunk = 2147483648"),
        (lambda m: setattr(m, "name", ""), "1 to 1024 bytes"),
        (lambda m: m.shape.extend([2**63, 2**63]), "w: shape"),
    ],
)
def test_a_message_that_means_no_entry_is_refused(change, words):
    message = entry_to_message(WEIGHT)
    change(message)
    with pytest.raises(ProtocolError) as caught:
        entry_from_message(message)
    assert words in str(caught.value)
