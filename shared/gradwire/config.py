"""What a run is: read from TOML by the aggregator, handed to every worker by GetRun.

Each section is a frozen model with all its bounds. A wrong file is refused at start, with the key, the value and
what is allowed; so are pairs of values that contradict each other.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradwire.codec import Dense, TopK
from gradwire.errors import ConfigError

Method = Literal["sparseloco", "demo", "dense", "topk"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BatchConfig(_Section):
    """How many samples a round trains, and in which pieces."""

    global_batch: int = Field(320, ge=1, le=1 << 40)  # samples a round, over all workers
    inner_batch: int = Field(16, ge=1, le=1 << 32)  # samples an inner step; shares are multiples of it
    shares: Literal["throughput", "fixed"] = "throughput"  # by measured speed, or all alike

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        if self.global_batch % self.inner_batch:
            raise ValueError(
                f"global_batch = {self.global_batch} is not a multiple of inner_batch = {self.inner_batch}"
            )
        return self


class RoundConfig(_Section):
    """When a round opens and closes. All times are in seconds."""

    min_workers: int = Field(1, ge=1, le=10_000)  # that must be ready to open a round, and answer to close it
    deadline_s: float = Field(120.0, gt=0, le=7 * 86400)  # from open to closed without the slow ones
    gather_s: float = Field(5.0, ge=0, le=3600)  # how long the ready wait for those of the last round
    lease_s: float = Field(15.0, gt=0, le=86400)  # silence after which a worker counts as gone
    heartbeat_s: float = Field(3.0, gt=0, le=3600)
    give_up_after_s: float = Field(600.0, gt=0, le=30 * 86400)  # how long a worker tries to reach the aggregator
    share_attempts: int = Field(3, ge=1, le=100)  # after which a share is skipped
    snapshot_every: int = Field(10, ge=1, le=1_000_000)  # rounds between snapshots for those that join later

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _ordered("heartbeat_s", self.heartbeat_s, "a third of lease_s", self.lease_s / 3, self.lease_s)
        _ordered("lease_s", self.lease_s, "give_up_after_s", self.give_up_after_s, self.give_up_after_s)
        _ordered("gather_s", self.gather_s, "deadline_s", self.deadline_s, self.deadline_s)
        return self


def _ordered(name: str, value: float, other: str, bound: float, other_value: float) -> None:
    if value > bound:
        raise ValueError(f"{name} = {value:g} must be at most {other} (that is {bound:g}, from {other_value:g})")


class ServerConfig(_Section):
    """Where the aggregator listens. HOST:PORT; port 0 takes a free one."""

    listen: str = "127.0.0.1:50051"
    http: str = "127.0.0.1:9464"  # /metrics; empty: none

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        for name, value in (("listen", self.listen), ("http", self.http)):
            host, _, port = value.rpartition(":")
            if (value or name == "listen") and not (host and port.isdigit() and int(port) < 65536):
                raise ValueError(f"{name} = {value!r} is not HOST:PORT, such as 0.0.0.0:50051")
        return self


class ModelConfig(_Section):
    """A decoder-only transformer over bytes."""

    kind: Literal["transformer"] = "transformer"
    dim: int = Field(128, ge=2, le=65536)
    layers: int = Field(4, ge=1, le=1024)
    heads: int = Field(4, ge=1, le=1024)
    context: int = Field(128, ge=1, le=1 << 20)  # tokens
    vocab: int = Field(256, ge=256, le=1 << 24)
    ffn_dim: int | None = Field(None, ge=1, le=1 << 20)  # default: 8/3 of dim, to the nearest multiple of 64

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim = {self.dim} is not a multiple of 2 * heads = {2 * self.heads} (rotary pairs)")
        return self


class DataConfig(_Section):
    """The text that the aggregator serves to the workers."""

    path: str = ""  # a file or folder on the aggregator's machine; empty: the Python standard library's source
    max_bytes: int = Field(16 << 20, ge=1024, le=1 << 40)
    held_out_fraction: float = Field(0.05, gt=0, lt=0.9)


class OptimizerConfig(_Section):
    """Learning rates are functions of the round alone."""

    lr: float = Field(3e-3, gt=0, le=100)
    warmup_rounds: float = Field(2.0, ge=0, le=1 << 40)
    final_lr_fraction: float = Field(0.1, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=10)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    momentum: float = Field(0.9, ge=0, lt=1)  # of SGD, method "topk"
    clip_norm: float = Field(1.0, ge=0)  # 0: none
    outer_lr: float = Field(1.0, gt=0, le=100)  # method "sparseloco"
    outer_momentum: float = Field(0.0, ge=0, lt=1)  # Nesterov's, method "sparseloco"; 0: none


class CompressionConfig(_Section):
    """What travels of a tensor: the k largest of every chunk."""

    k: int = Field(64, ge=1, le=32768)
    chunk: int = Field(4096, ge=1, le=32768)
    layout: Literal["tiles", "flat"] = "tiles"
    values: Literal["bf16", "fp32", "sign"] = "bf16"
    indices: Literal["auto", "u8", "u16", "gap8"] = "auto"
    dense_below: int = Field(4096, ge=0, le=1 << 53)  # elements
    residual_decay: float | None = Field(None, ge=0, le=1)  # error feedback; 0: none; default: by the method
    update: Literal["sign", "coefficients"] = "sign"  # what comes back, method "demo"
    clip: Literal["none", "median"] = "none"  # of the workers' norms; not method "dense"


class TrainingConfig(_Section):
    """What workers of `gradwire worker` train. A run of own scripts has no such section."""

    method: Method = "sparseloco"
    evaluate_every: int = Field(2, ge=1, le=1 << 53)  # rounds between measurements on held-out data
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compression: CompressionConfig = CompressionConfig()

    @property
    def top_k(self) -> TopK:
        """How tensors travel, but with method "dense". Raises ConfigError where keys contradict each other."""
        keys, demo = self.compression, self.method == "demo"
        if demo and keys.layout != "tiles":
            raise ConfigError(f"compression.layout = {keys.layout!r} with method 'demo': allowed is 'tiles'")
        return TopK(
            k=keys.k,
            chunk=keys.chunk,
            layout=keys.layout,
            transform="dct" if demo else None,
            values=keys.values,
            indices=keys.indices,
            dense_below=keys.dense_below,
            normalization="contributors" if self.method == "topk" else "senders",
            update=keys.update if demo else "coefficients",
            clip="median" if keys.clip == "median" else None,
        )

    @property
    def dense(self) -> Dense:
        """How tensors travel with method "dense". Raises ConfigError where keys contradict each other."""
        if self.compression.values == "sign":
            raise ConfigError("compression.values = 'sign' with method 'dense': allowed are 'bf16' and 'fp32'")
        return Dense(self.compression.values)

    @property
    def residual_decay(self) -> float:
        """Of the error feedback: the momentum of DeMo."""
        default = 0.999 if self.method == "demo" else 0.95
        return default if self.compression.residual_decay is None else self.compression.residual_decay

    @model_validator(mode="after")
    def _makes_a_scheme(self) -> Self:
        try:
            _ = self.top_k
            if self.method == "dense":
                _ = self.dense
        except ConfigError as error:
            raise ValueError(str(error).replace("TopK.", "compression.")) from error
        return self


class RunConfig(_Section):
    """One training job."""

    name: str = Field("run", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0, lt=1 << 53)
    rounds: int = Field(100, ge=1, le=1 << 40)
    batch: BatchConfig = BatchConfig()
    round: RoundConfig = RoundConfig()
    server: ServerConfig = ServerConfig()
    training: TrainingConfig | None = None

    @model_validator(mode="after")
    def _warms_up_in_time(self) -> Self:
        warmup = self.training.optimizer.warmup_rounds if self.training else 0.0
        if warmup >= self.rounds:
            raise ValueError(f"training.optimizer.warmup_rounds = {warmup:g} must be less than rounds = {self.rounds}")
        return self


def read_config(path: Path) -> RunConfig:
    """The config in a TOML file. Raises ConfigError naming the file, the key, the value and what is allowed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {path}: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return parse_config(data, source=str(path))


def parse_config(data: dict[str, Any], *, source: str) -> RunConfig:
    """The config in a nested mapping. Raises ConfigError with one line per problem."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = [_problem(data, item["loc"], item["msg"], item["type"]) for item in error.errors()]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from error


def _problem(data: dict[str, Any], location: tuple[str | int, ...], message: str, kind: str) -> str:
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"{key}: there is no such key; {_siblings(location)}"
    value: Any = data
    for part in location:
        value = value.get(part) if isinstance(value, dict) else None
    text = message.removeprefix("Value error, ")
    if isinstance(value, dict) or not key:
        return f"[{key}] {text}" if key else text
    return f"{key} = {value!r}: {text[:1].lower()}{text[1:]}"


def _siblings(location: tuple[str | int, ...]) -> str:
    section: Any = RunConfig
    for part in location[:-1]:
        annotation = section.model_fields[str(part)].annotation
        kinds = [k for k in getattr(annotation, "__args__", (annotation,)) if isinstance(k, type)]
        section = next(k for k in kinds if issubclass(k, BaseModel))
    return "allowed here: " + ", ".join(section.model_fields)
