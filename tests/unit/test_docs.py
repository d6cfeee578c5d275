"""docs/protocol.md and docs/config.md say what the code does: tables, limits and examples are read out of them."""

from __future__ import annotations

import hashlib
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import annotated_types
import numpy as np
import pytest
import torch
import zstandard
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradwire import codec, errors, manifest, retry
from gradwire.codec import Dense, Encoded, Form, TopK, dct
from gradwire.codec import indices as index_forms
from gradwire.codec.scheme import MAX_CHUNK
from gradwire.codec.values import pack_signs, unpack_signs
from gradwire.config import CompressionConfig, RunConfig, TrainingConfig, parse_config
from gradwire.errors import ConfigError
from gradwire.manifest import Entry, Manifest, Role
from gradwire.samples import SampleOrder
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1 import tensors_pb2
from gradwire.wire import calls, channel, schemas
from gradwire.wire.messages import PartReader, Tally, absent_positions, write_parts
from gradwire.wire.packing import planes, unpack
from gradwire_aggregator import handlers, servicer, snapshots

DOCS = Path(__file__).parents[2] / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text(encoding="utf-8")
CONFIG = (DOCS / "config.md").read_text(encoding="utf-8")

Fields = list[tuple[str, str]]


# --- reading the documents


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows in a text."""
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip().strip("|").split(" |")] for line in lines]


def code(cell: str) -> str:
    """A cell that is one piece of code, without its ticks; empty for any other."""
    return cell.strip("`") if re.fullmatch(r"`[^`]+`", cell) else ""


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of its level."""
    level = heading.split()[0]
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^{level} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no heading {heading!r}"
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def examples(kind: str) -> list[Fields]:
    """The worked examples of a kind, as (key, value) pairs in order."""
    found: list[Fields] = []
    for block in blocks(PROTOCOL, f"example {kind}"):
        joined = re.sub(r"\n +", " ", block)
        found.append([(key, value.strip()) for key, _, value in (line.partition(":") for line in joined.splitlines())])
    assert found, f"there is no example of {kind}"
    return found


def all_of(fields: Fields, key: str) -> list[str]:
    return [value for name, value in fields if name == key]


def one(fields: Fields, key: str) -> str:
    (value,) = all_of(fields, key)
    return value


def data_of(text: str) -> bytes:
    return bytes.fromhex(text)


def numbers_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def floats_of(text: str) -> torch.Tensor:
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float32)


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def scheme_of(text: str) -> TopK:
    """A top-k scheme written as `k=2 chunk=16 ...`; small tensors are not dense unless it says so."""
    words = dict(word.split("=") for word in text.split())
    return TopK(**{"dense_below": 0, **{key: int(value) if value.isdigit() else value for key, value in words.items()}})


def test_the_examples_are_of_known_kinds():
    kinds = set(re.findall(r"^```example (\w+)$", PROTOCOL, re.MULTILINE))
    known = set(re.findall(r'(?:one_example|examples)\("(\w+)"\)', Path(__file__).read_text(encoding="utf-8")))
    assert kinds == known
    assert PROTOCOL.count("```example") == len(re.findall(r"^```example \w+$", PROTOCOL, re.MULTILINE))


def one_example(kind: str) -> Fields:
    (example,) = examples(kind)
    return example


# --- protocol.md: tables


def test_every_call_is_in_the_table_with_its_kind():
    kinds = {(False, False): "unary", (True, False): "client stream", (False, True): "server stream"}
    service = pb.DESCRIPTOR.services_by_name["AggregationService"]
    expected = {m.name: kinds[m.client_streaming, m.server_streaming] for m in service.methods}
    table = {code(row[0]): row[1] for row in rows(section(PROTOCOL, "## 1. Calls")) if code(row[0])}
    assert table == expected
    assert f"`{service.full_name}`" in PROTOCOL
    assert service.full_name == handlers.SERVICE


def test_the_statuses_are_those_of_the_code():
    table = [row for row in rows(section(PROTOCOL, "## 4. Errors and retries")) if code(row[0])]
    named = {code(error): code(status) for status, error, _, _ in table if error != "none"}
    assert named == {kind.__name__: status.name for kind, status in errors.STATUS.items()}
    retried = {code(status) for status, _, again, _ in table if again == "yes"}
    assert retried == {status.name for status in errors.RETRYABLE}
    assert not retried & set(named.values())
    few = {code(row[0]) for row in table if f"Try {retry.Retry().attempts} times in all" in row[3]}
    away = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
    assert few == retried - away
    assert f"`{errors.ERROR_KEY}`" in PROTOCOL


def test_the_retry_policy_is_the_sessions():
    policy = retry.Retry()
    assert f"starts at {policy.first_s:g} s and doubles up to {policy.longest_s:g} s" in prose(PROTOCOL)


def prose(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_token_travels_as_documented():
    assert calls.metadata("TOKEN") == (("authorization", "Bearer TOKEN"),)
    assert "`authorization: Bearer TOKEN`" in PROTOCOL


@pytest.mark.parametrize(("enum", "module"), [("Verdict", pb), ("Order", pb), ("StartFrom", pb), ("Form", tensors_pb2)])
def test_every_value_of_an_enum_is_documented(enum, module):
    names = {value.name for value in module.DESCRIPTOR.enum_types_by_name[enum].values if value.number}
    table = {code(row[0]) for row in rows(PROTOCOL)}
    paragraphs = {"FORM_DENSE": "**Dense** (`FORM_DENSE`)", "FORM_SIGN": "**The sign of every weight** (`FORM_SIGN`)"}
    in_the_text = {name for name, words in paragraphs.items() if words in PROTOCOL}
    assert not names - table - in_the_text


def test_the_enums_of_the_fingerprint_are_the_protos():
    for table, enum in (
        (manifest._VALUES, "ValueType"),
        (manifest._LAYOUTS, "ChunkLayout"),
        (manifest._INDICES, "IndexForm"),
        (manifest._NORMALIZATIONS, "Normalization"),
        (manifest._TRANSFORMS, "Transform"),
        (manifest._UPDATES, "Update"),
        (manifest._CLIPS, "Clip"),
    ):
        values = tensors_pb2.DESCRIPTOR.enum_types_by_name[enum].values
        named = {re.sub(r"^[A-Z_0-9]*_(?=[A-Z0-9]+$)", "", value.name).lower(): value.number for value in values}
        words = {str(word).lower(): number for word, number in table.items()}  # None is NONE
        assert words == {word: number for word, number in named.items() if number}
        assert f"`{enum}`" in PROTOCOL


def limit(what: str) -> str:
    (found,) = (row[1] for row in rows(section(PROTOCOL, "## 18. Limits")) if row[0] == what)
    return found


def first_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("message", [channel.MESSAGE_BYTES]),
        ("payload of a part, unpacked", [channel.PAYLOAD_BYTES]),
        ("data of one message of `FetchData`, `PublishSnapshot`, `FetchSnapshot`", [channel.PAYLOAD_BYTES]),
        ("entries in a message of `Join`", [schemas.ENTRIES_PER_MESSAGE]),
        ("tensors in a manifest", [manifest.MAX_TENSORS]),
        ("name of a tensor", [1, manifest.MAX_NAME_BYTES]),
        ("dimensions of a tensor", [manifest.MAX_DIMENSIONS]),
        ("elements of a tensor", [manifest.MAX_ELEMENTS, 2, 48]),
        ("chunk", [1, MAX_CHUNK]),
        ("reasons, checkpoint", [servicer.MAX_WORDS]),
        ("snapshot", [4 * snapshots.SIZE_FACTOR, snapshots.SIZE_SLACK_BYTES]),
        ("time that `Begin`, `Collect` and `FetchSnapshot` wait at a stretch", [int(servicer.PATIENCE_S)]),
    ],
)
def test_the_limits_are_those_of_the_code(what, expected):
    assert first_numbers(limit(what))[: len(expected)] == expected


def test_the_protocol_version_is_named():
    assert f"Protocol version: {channel.PROTOCOL}." in prose(PROTOCOL)


def test_the_payload_bound_stands_in_the_text_too():
    assert f"at most {channel.PAYLOAD_BYTES} bytes" in prose(section(PROTOCOL, "## 14. Parts"))


def test_links_lead_somewhere():
    for text in (PROTOCOL, CONFIG):
        anchors = {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert target[1:] in anchors if target.startswith("#") else (DOCS / target).exists(), target


# --- protocol.md: worked examples


def entry_of(text: str) -> Entry:
    """An entry written as `name role shape kind key=value ...`."""
    name, role, shape, kind, *options = text.split()
    scheme = Dense(options[0].removeprefix("values=")) if kind == "dense" else scheme_of(" ".join(options))
    return Entry(name, shape_of(shape), scheme, Role[role.upper()])


def manifest_of_the_document() -> Manifest:
    example = one_example("fingerprint")
    return Manifest(one(example, "method"), tuple(entry_of(text) for text in all_of(example, "entry")))


def test_the_fingerprint_example():
    example = one_example("fingerprint")
    assert hashlib.sha256(data_of(one(example, "bytes"))).hexdigest() == one(example, "sha256")
    assert manifest_of_the_document().fingerprint.hex() == one(example, "sha256")


@pytest.mark.parametrize("example", examples("chunks"), ids=lambda example: one(example, "shape"))
def test_the_chunk_examples(example):
    shape = shape_of(one(example, "shape"))
    layout = codec.layout_of(scheme_of(one(example, "scheme")), shape)
    tile = one(example, "tile")
    assert layout.tile == (None if tile == "none" else shape_of(tile))
    assert layout.numel == int(np.prod(shape))
    in_order = layout.to_chunks(torch.arange(layout.numel).view(shape)).tolist()
    documented = [value.partition(":") for key, value in example if key.startswith("chunk ")]
    assert [key for key, _ in example if key.startswith("chunk ")] == [f"chunk {n}" for n in range(layout.chunks)]
    assert [int(kept) for kept, _, _ in documented] == layout.kept_counts().tolist()
    assert [len(numbers_of(positions)) for _, _, positions in documented] == layout.lengths().tolist()
    assert [each for _, _, positions in documented for each in numbers_of(positions)] == in_order


def test_the_transform_example():
    example = one_example("transform")
    tile, elements = shape_of(one(example, "tile")), floats_of(one(example, "elements"))
    coefficients = floats_of(one(example, "coefficients"))
    torch.testing.assert_close(dct.transform(elements, tile), coefficients, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dct.invert(coefficients, tile), elements, rtol=1e-6, atol=1e-6)
    scheme = TopK(k=9, chunk=9, transform="dct", values="fp32", dense_below=0)  # a tile at most 3 x 3: the whole
    sent = np.frombuffer(codec.encode(elements.view(tile), scheme).values, "<f4")
    np.testing.assert_allclose(sent, coefficients, rtol=1e-6, atol=1e-6)


def test_the_selection_example():
    example = one_example("selection")
    scheme = scheme_of(one(example, "scheme") + " indices=u8 values=fp32")
    encoded = codec.encode(floats_of(one(example, "tensor")), scheme)
    assert list(encoded.indices) == numbers_of(one(example, "indices"))
    assert encoded.values == floats_of(one(example, "values")).numpy().tobytes()


def test_the_value_examples():
    example = one_example("values")
    for kind in ("bf16", "fp32"):
        assert codec.encode(floats_of(one(example, "numbers")), Dense(kind)).values == data_of(one(example, kind))


def test_the_sign_example():
    example = one_example("signs")
    chunks = [floats_of(text) for text in all_of(example, "values")]
    counts = np.array([len(chunk) for chunk in chunks])
    signs, scales = pack_signs(torch.cat(chunks), counts, name="w")
    assert (signs, scales) == (data_of(one(example, "signs")), data_of(one(example, "scales")))
    assert unpack_signs(signs, scales, counts).tolist() == floats_of(one(example, "decoded")).tolist()


@pytest.mark.parametrize("example", examples("indices"), ids=lambda example: one(example, "form"))
def test_the_index_examples(example):
    form = Form[one(example, "form").removeprefix("FORM_")]
    chunks = [numbers_of(line) for line in all_of(example, "indices")]
    counts = np.array([len(chunk) for chunk in chunks])
    lengths = np.full(len(chunks), int(one(example, "chunk")))
    flat = np.array([index for chunk in chunks for index in chunk])
    assert index_forms.pack(form, flat, counts, lengths) == data_of(one(example, "bytes"))
    assert index_forms.unpack(form, data_of(one(example, "bytes")), counts, lengths).tolist() == flat.tolist()


def test_the_dense_example():
    example = one_example("dense")
    tensor = floats_of(one(example, "tensor")).view(shape_of(one(example, "shape")))
    encoded = codec.encode(tensor, Dense(one(example, "type")))
    assert encoded == Encoded(Form.DENSE, data_of(one(example, "bytes")))


def average_of(example: Fields) -> tuple[Encoded, TopK, tuple[int, ...]]:
    """The aggregate of the contributions in an example, its scheme and its shape."""
    scheme, shape = scheme_of(one(example, "scheme")), shape_of(one(example, "shape"))
    pairs = zip(all_of(example, "contribution values"), all_of(example, "contribution indices"), strict=True)
    contributions = [Encoded(Form.U8, data_of(values), data_of(indices)) for values, indices in pairs]
    weights = floats_of(one(example, "weights")).tolist()
    mean = codec.average(contributions, weights, scheme=scheme, shape=shape)
    assert mean is not None
    return mean, scheme, shape


def test_the_update_example():
    example = one_example("update")
    mean, scheme, shape = average_of(example)
    assert f"FORM_{mean.form.name}" == one(example, "form")
    assert mean == Encoded(Form.SIGN, data_of(one(example, "values")), counts=data_of(one(example, "counts")))
    assert codec.decode(mean, scheme, shape).flatten().tolist() == floats_of(one(example, "decoded")).tolist()


@pytest.mark.parametrize("example", examples("aggregate"), ids=["contributors", "senders"])
def test_the_aggregate_examples(example):
    mean, scheme, shape = average_of(example)
    assert f"FORM_{mean.form.name}" == one(example, "form")
    assert mean.values == data_of(one(example, "values"))
    assert mean.counts == data_of(one(example, "counts"))
    assert mean.indices == data_of(one(example, "indices"))
    entries = {at: value for at, value in enumerate(codec.decode(mean, scheme, shape).tolist()) if value}
    documented = dict(entry.split("=") for entry in one(example, "entries").split())
    assert entries == {int(at): float(value) for at, value in documented.items()}


def test_the_parts_example():
    example, run_manifest = one_example("parts"), manifest_of_the_document()
    tensors = []
    for number, entry in enumerate(run_manifest):
        flat = torch.zeros(entry.elements)
        for text in all_of(example, f"tensor {number}"):
            for pair in text.split(","):
                value, at = pair.split(" at ")
                flat[int(at)] = float(value)
        tensors.append(codec.encode(flat.view(entry.shape), entry.scheme))
    tally = Tally()
    parts = list(write_parts(run_manifest, tensors, tally))
    assert [part.SerializeToString() for part in parts] == [data_of(text) for text in all_of(example, "part")]
    assert tally.commit().SerializeToString() == data_of(one(example, "commit"))
    assert f"{tally.crc32:08x}" == one(example, "crc32")
    reader = PartReader(run_manifest, absent=absent_positions(tensors), aggregate=False)
    for text in all_of(example, "part"):
        reader.add(tensors_pb2.Part.FromString(data_of(text)))
    assert reader.finish(tensors_pb2.Commit.FromString(data_of(one(example, "commit")))) == tensors


def test_the_packing_example():
    example = one_example("packing")
    values = data_of(one(example, "values"))
    documented = [data_of(text) for text in all_of(example, "plane")]
    assert planes(values, 2) == documented
    for frame, plane in zip(all_of(example, "frame"), documented, strict=True):
        assert unpack(data_of(frame), at_most=len(plane)) == plane
        assert zstandard.get_frame_parameters(data_of(frame)).content_size == len(plane)


def test_the_sample_example():
    example = one_example("samples")
    seed, length = int(one(example, "seed")), int(one(example, "length"))
    draws = np.random.Philox(key=np.array([seed, 2], dtype=np.uint64)).random_raw(length)
    assert [f"{draw:016x}" for draw in draws] == one(example, "draws of epoch 2").split()
    order = SampleOrder(seed, length)
    for epoch in range(3):
        documented = numbers_of(one(example, f"order of epoch {epoch}"))
        assert order.indices(epoch * length, (epoch + 1) * length).tolist() == documented


# --- config.md


def models(model: type[BaseModel] = RunConfig, path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(section, model) of the whole config; the top has the name ''."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is not None:
            yield from models(inner, f"{path}.{name}".lstrip("."))


def model_in(annotation: object) -> type[BaseModel] | None:
    candidates = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {name: field for name, field in model.model_fields.items() if model_in(field.annotation) is None}


def table_of(path: str) -> dict[str, list[str]]:
    under = section(CONFIG, f"## `[{path}]`" if path else "## Run")
    return {code(row[0]): row[1:] for row in rows(under) if code(row[0])}


SECTIONS = list(models())
KEYS = [(path, name, field) for path, model in SECTIONS for name, field in keys_of(model).items()]


@pytest.mark.parametrize(("path", "model"), SECTIONS, ids=[path or "top" for path, _ in SECTIONS])
def test_every_key_is_documented_and_no_other(path, model):
    assert list(table_of(path)) == list(keys_of(model))


def test_every_section_has_its_heading():
    headings = re.findall(r"^## `\[(.*)\]`$", CONFIG, re.MULTILINE)
    assert headings == [path for path, _ in SECTIONS if path]


@pytest.mark.parametrize(("path", "name", "field"), KEYS, ids=[f"{path}.{name}" for path, name, _ in KEYS])
def test_a_key_has_its_type_default_and_range(path, name, field):
    kind, default, allowed, _, meaning = table_of(path)[name]
    annotation = next((a for a in typing.get_args(field.annotation) if a in (int, float)), field.annotation)
    literals = typing.get_args(annotation)
    assert kind == {int: "integer", float: "number"}.get(annotation, "string")
    if field.default is None:
        assert default == "unset"
    else:
        value = tomllib.loads(f"value = {code(default)}")["value"]
        assert value == field.default
        assert type(value) is type(field.default)
    if literals:
        assert tuple(re.findall(r'"(\w+)"', allowed)) == literals
    elif annotation in (int, float):
        assert interval(allowed) == bounds_of(field)
    assert meaning.endswith((".", ":"))


def bounds_of(field: FieldInfo) -> dict[str, float]:
    """The bounds of a number, by pydantic's names."""
    names = {annotated_types.Ge: "ge", annotated_types.Gt: "gt", annotated_types.Le: "le", annotated_types.Lt: "lt"}
    metadata = field.metadata
    if not metadata:  # of an optional number
        inner = next(arg for arg in typing.get_args(field.annotation) if arg is not type(None))
        metadata = list(getattr(inner, "__metadata__", ()))
    return {names[type(each)]: getattr(each, names[type(each)]) for each in metadata if type(each) in names}


def interval(text: str) -> dict[str, float]:
    """`[above] A to [below] B` or `A or more`, in the same terms."""
    found = re.fullmatch(r"(above )?(\S+) (?:or more|to (below )?(\S+))", text)
    assert found, text
    low = {"gt" if found[1] else "ge": number(found[2])}
    return low | ({"lt" if found[3] else "le": number(found[4])} if found[4] else {})


def number(text: str) -> float:
    base, _, exponent = text.partition("^")
    return int(base) ** int(exponent) if exponent else float(text)


def test_the_pattern_of_names_is_documented():
    field = RunConfig.model_fields["name"]
    assert "A-Za-z0-9._-" in str(field.metadata)
    assert table_of("")["name"][2] == "1 to 128 of `A-Z a-z 0-9 . _ -`"


def complete_examples() -> list[RunConfig]:
    return [parse_config(tomllib.loads(block), source="docs/config.md") for block in blocks(CONFIG, "toml")]


def test_the_examples_parse():
    workers, scripts = complete_examples()
    # That default is the method's, so the example has its number.
    compression = CompressionConfig(residual_decay=TrainingConfig().residual_decay)
    assert workers == RunConfig(training=TrainingConfig(compression=compression))
    assert scripts.training is None


def test_the_example_for_workers_shows_every_key():
    shown = tomllib.loads(blocks(CONFIG, "toml")[0])
    for path, model in SECTIONS:
        values = shown
        for part in filter(None, path.split(".")):
            values = values[part]
        assert set(keys_of(model)) - set(values) <= {"ffn_dim"}


REFUSED = [(row[0], code(row[1])) for row in rows(section(CONFIG, "## What is refused at start")) if code(row[1])]


@pytest.mark.parametrize(("words", "example"), REFUSED, ids=[example for _, example in REFUSED])
def test_what_is_said_to_be_refused_is(words, example):
    with pytest.raises(ConfigError) as refused:
        parse_config(tomllib.loads(example.replace("; ", "\n")), source="example")
    named = [key.rpartition(".")[2] for key in re.findall(r"`([a-z_.0-9]+)`", words)]
    assert any(key in str(refused.value) for key in named)


def test_every_contradiction_has_an_example():
    checks = sum(len(model.__pydantic_decorators__.model_validators) for _, model in SECTIONS)
    assert checks == 6  # batch, round (3 rules), server, model, compression (3 rules), run
    assert len(REFUSED) == 12


# --- both


@pytest.mark.parametrize("text", [PROTOCOL, CONFIG], ids=["protocol", "config"])
def test_lines_of_prose_are_short(text):
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []
