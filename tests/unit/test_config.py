"""A run's config: wrong ones are refused with the key, the value and what is allowed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.config import BatchConfig, RoundConfig, RunConfig, ServerConfig, parse_config, read_config
from gradwire.errors import ConfigError
from gradwire.manifest import Entry
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire.schemas import entry_from_message, entry_to_message


def refusal(toml: str) -> str:
    """Why a config in TOML is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(tomllib.loads(toml), source="run.toml")
    assert str(caught.value).startswith("run.toml: ")
    return str(caught.value).removeprefix("run.toml: ")


def test_an_empty_config_is_valid():
    config = parse_config({}, source="run.toml")
    assert config == RunConfig()
    assert config.training is None


def test_an_empty_training_section_is_valid():
    config = parse_config({"training": {}}, source="run.toml")
    assert config.training is not None
    assert config.training.method == "sparseloco"
    assert config.training.top_k.k == 64


def test_values_are_read_from_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "tiny"\nrounds = 7\n[batch]\nglobal_batch = 64\n[training.model]\ndim = 64\nheads = 2\n',
        encoding="utf-8",
    )
    config = read_config(path)
    assert (config.name, config.rounds, config.batch.global_batch) == ("tiny", 7, 64)
    assert config.batch.inner_batch == BatchConfig().inner_batch
    assert config.training is not None
    assert (config.training.model.dim, config.training.model.heads) == (64, 2)


def test_a_file_that_is_not_toml_is_refused_with_the_place(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\nrounds = = 3\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML: .*line 2"):
        read_config(path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff")])
def test_a_file_that_can_not_be_read_is_refused_by_name(tmp_path, make):
    path = tmp_path / "run.toml"
    make(path)
    with pytest.raises(ConfigError, match=r"cannot read the config .*run\.toml"):
        read_config(path)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("round_count = 3", "round_count: there is no such key; allowed here: name, seed, rounds, batch, round"),
        (
            "[batch]\nsize = 3",
            "batch.size: there is no such key; allowed here: global_batch, inner_batch, shares",
        ),
        ("[training]\nlr = 0.1", "training.lr: there is no such key; allowed here: method, evaluate_every, model"),
        ("[training.model]\nwidth = 3", "training.model.width: there is no such key; allowed here: kind, dim, layers"),
        ("[training.compression]\ntopk = 3", "training.compression.topk: there is no such key; allowed here: k, chunk"),
    ],
)
def test_an_unknown_key_is_refused_with_the_ones_allowed(toml, words):
    assert refusal(toml).startswith(words)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("rounds = 0", ["rounds = 0", "greater than or equal to 1"]),
        ("rounds = 1.5", ["rounds = 1.5", "integer"]),
        ('rounds = "many"', ["rounds = 'many'", "integer"]),
        ('name = "my run"', ["name = 'my run'", "A-Za-z0-9._-"]),
        ('name = "run\\n"', [r"name = 'run\n'", "A-Za-z0-9._-"]),
        ('name = ""', ["name = ''", "at least 1"]),
        (f"seed = {2**53}", [f"seed = {2**53}", "less than 9007199254740992"]),
        ("seed = -1", ["seed = -1", "greater than or equal to 0"]),
        ('[batch]\nshares = "fair"', ["batch.shares = 'fair'", "'throughput' or 'fixed'"]),
        ("[round]\ndeadline_s = -5.0", ["round.deadline_s = -5.0", "greater than 0"]),
        ("[round]\ndeadline_s = nan", ["round.deadline_s = nan", "finite"]),
        ("[round]\ndeadline_s = inf", ["round.deadline_s = inf", "finite"]),
        ("[round]\nmin_workers = 0", ["round.min_workers = 0", "greater than or equal to 1"]),
        ('[training]\nmethod = "magic"', ["training.method = 'magic'", "'sparseloco', 'demo', 'dense' or 'topk'"]),
        ("[training.optimizer]\nbeta2 = 1.0", ["training.optimizer.beta2 = 1.0", "less than 1"]),
        ("[training.compression]\nchunk = 65536", ["training.compression.chunk = 65536", "32768"]),
        ("[training.model]\ndim = 100\nheads = 3", ["training.model", "dim = 100", "2 * heads = 6"]),
        ("batch = 3", ["batch = 3", "dictionary"]),
        ('[server]\nlisten = "50051"', ["server", "listen = '50051' is not HOST:PORT"]),
        ('[server]\nlisten = ""', ["server", "listen = '' is not HOST:PORT"]),
        ('[server]\nlisten = "host:70000"', ["server", "'host:70000' is not HOST:PORT"]),
        ('[server]\nhttp = ":9464"', ["server", "http = ':9464' is not HOST:PORT"]),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(toml, words):
    text = refusal(toml)
    assert [word for word in words if word not in text] == []


def test_every_wrong_value_is_named_at_once():
    text = refusal("rounds = 0\nseed = -1\nfoo = 1\n[batch]\nshares = 'x'")
    assert len(text.splitlines()) == 4
    for key in ("rounds = 0", "seed = -1", "foo: there is no such key", "batch.shares = 'x'"):
        assert key in text


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[round]\nheartbeat_s = 6.0\nlease_s = 15.0", ["heartbeat_s = 6", "lease_s / 3|a third of lease_s", "15"]),
        ("[round]\nlease_s = 700.0", ["lease_s = 700", "give_up_after_s", "600"]),
        ("[round]\ngather_s = 200.0", ["gather_s = 200", "deadline_s", "120"]),
        ("[batch]\nglobal_batch = 100\ninner_batch = 16", ["global_batch = 100", "inner_batch = 16"]),
        ("[batch]\nglobal_batch = 8", ["global_batch = 8", "inner_batch = 16"]),
        ("rounds = 2\n[training]", ["warmup_rounds = 2", "rounds = 2"]),
    ],
)
def test_values_that_contradict_each_other_are_both_named(toml, words):
    text = refusal(toml)
    assert [word for word in words if not any(each in text for each in word.split("|"))] == []


def test_times_that_just_fit_are_fine():
    RoundConfig(heartbeat_s=5.0, lease_s=15.0, give_up_after_s=15.0, gather_s=10.0, deadline_s=10.0)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (
            "method = 'demo'\n[training.compression]\nlayout = 'flat'",
            ["compression.layout = 'flat'", "'demo'", "'tiles'"],
        ),
        (
            "method = 'dense'\n[training.compression]\nvalues = 'sign'",
            ["compression.values = 'sign'", "'dense'", "'bf16'"],
        ),
    ],
)
def test_a_compression_that_the_method_lacks_is_refused(toml, words):
    text = refusal(f"[training]\n{toml}")
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("method", "decay"), [("demo", 0.999), ("sparseloco", 0.95), ("topk", 0.95)])
def test_the_residual_decay_follows_the_method_unless_it_is_given(method, decay):
    training = {"method": method}
    assert parse_config({"training": training}, source="t").training.residual_decay == decay
    training["compression"] = {"residual_decay": 0.5}
    assert parse_config({"training": training}, source="t").training.residual_decay == 0.5


def test_one_byte_indices_of_large_chunks_are_refused():
    text = refusal("[training.compression]\nindices = 'u8'\nchunk = 4096")
    for word in ("[training] compression.indices = 'u8'", "at most 256", "4096"):
        assert word in text
    parse_config({"training": {"compression": {"indices": "u8", "chunk": 256}}}, source="run.toml")


def test_more_kept_than_a_chunk_has_is_refused():
    text = refusal("[training.compression]\nk = 65\nchunk = 64")
    assert "k = 65" in text
    assert "64" in text


def test_tiles_that_are_not_square_are_refused():
    text = refusal("[training.compression]\nchunk = 1000")
    assert "chunk = 1000" in text
    assert "'flat'" in text


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::1]:0", "host.example:65535"])
def test_addresses_are_host_and_port(address):
    assert ServerConfig(listen=address, http="").listen == address


def over_the_wire(config: RunConfig) -> RunConfig:
    """What a worker makes of a config: the aggregator's GetRun and the session's `open`, in bytes between."""
    struct = struct_pb2.Struct()
    struct.update(config.model_dump(exclude={"server"}, exclude_none=True))
    answer = pb.GetRunResponse.FromString(pb.GetRunResponse(config=struct).SerializeToString())
    return parse_config(json_format.MessageToDict(answer.config), source="the config sent by the aggregator")


FLOATS = st.floats(0.001, 0.89)
CONFIGS = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[A-Za-z0-9._-]{1,128}", fullmatch=True),
        "seed": st.integers(0, 2**53 - 1),
        "rounds": st.integers(3, 2**40),
        "batch": st.builds(
            lambda units, inner, shares: {"global_batch": units * inner, "inner_batch": inner, "shares": shares},
            st.integers(1, 2**8),
            st.integers(1, 2**32),
            st.sampled_from(["throughput", "fixed"]),
        ),
        "round": st.fixed_dictionaries(
            {"min_workers": st.integers(1, 10_000), "snapshot_every": st.integers(1, 10**6), "gather_s": FLOATS}
        ),
    },
    optional={
        "training": st.fixed_dictionaries(
            {
                "method": st.sampled_from(["sparseloco", "dense", "topk"]),
                "evaluate_every": st.integers(1, 2**53),
                "model": st.fixed_dictionaries({}, optional={"ffn_dim": st.integers(1, 2**20)}),
                "data": st.fixed_dictionaries(
                    {"path": st.text(st.characters(codec="utf-8"), max_size=10), "held_out_fraction": FLOATS}
                ),
                "optimizer": st.fixed_dictionaries({"lr": FLOATS, "warmup_rounds": FLOATS, "outer_lr": FLOATS}),
                "compression": st.fixed_dictionaries(
                    {"layout": st.just("flat"), "k": st.integers(1, 64), "chunk": st.integers(64, 32768)}
                ),
            }
        )
    },
)


@settings(deadline=None)
@given(CONFIGS)
def test_a_worker_sees_the_config_that_the_aggregator_has(data):
    config = parse_config(data, source="run.toml")
    assert over_the_wire(config) == config.model_copy(update={"server": ServerConfig()})


def test_the_aggregators_addresses_are_not_sent():
    config = RunConfig(server=ServerConfig(listen="10.1.2.3:4567", http=""))
    assert over_the_wire(config).server == ServerConfig()


@pytest.mark.parametrize("number", [2**53 + 1, 2**64, 10**400], ids=["2^53+1", "2^64", "10^400"])
@pytest.mark.parametrize("key", ["evaluate_every", "compression.dense_below"])
def test_a_number_too_large_for_the_wire_is_refused_at_start(key, number):
    # The config travels as doubles, the scheme as u64: what neither can hold must not be found out by a worker.
    *section, name = key.split(".")
    data = {"training": {section[0]: {name: number}} if section else {name: number}}
    with pytest.raises(ConfigError, match=rf"{name} = {number}"):
        parse_config(data, source="run.toml")


@settings(deadline=None)
@given(CONFIGS)
def test_the_scheme_of_a_valid_config_can_be_sent(data):
    config = parse_config({**data, "training": data.get("training", {})}, source="run.toml")
    entry = Entry("w", (64, 64), config.training.top_k)
    assert entry_from_message(entry_to_message(entry)) == entry


def test_example_configs_are_valid():
    root = Path(__file__).parents[2]
    for path in [*root.glob("examples/**/*.toml"), *root.glob("deploy/**/run*.toml")]:
        read_config(path)
