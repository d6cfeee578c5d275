"""What a tensor's encoding is: the two schemes, the six forms, and the encoded bytes themselves.

Both sides know the scheme from the run's manifest; the form stands in the header of every encoded tensor.
Top-k per chunk follows DeMo (Peng et al., 2024) and SparseLoCo (Sarfi et al., 2025).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from gradwire.errors import ConfigError

MAX_CHUNK: Final = 32_768

WholeKind: TypeAlias = Literal["bf16", "fp32"]
ValueKind: TypeAlias = WholeKind | Literal["sign"]


class Form(enum.IntEnum):
    """How a tensor's coefficients are laid down in bytes; the numbers are the wire's."""

    DENSE = 1  # every element, in row-major order, no indices
    U8 = 2  # one byte per index, chunks of at most 256
    U16 = 3  # two bytes per index, little-endian
    GAP8 = 4  # gaps between indices, about one byte each
    BITMAP = 5  # one bit per coefficient, in aggregates only
    SIGN = 6  # the sign of every weight, in aggregates of update "sign" only


@dataclass(frozen=True)
class Dense:
    """Every element travels: 2 bytes each as `bf16`, 4 as `fp32`.

    Raises ConfigError if `values` is neither.
    """

    values: WholeKind = "bf16"

    def __post_init__(self) -> None:
        _one_of("Dense", "values", self.values, ("bf16", "fp32"))


@dataclass(frozen=True)
class TopK:
    """The `k` largest of every `chunk` coefficients travel, with their indices.

    k, chunk: 1 <= k <= chunk <= 32768.
    layout: "tiles" (2-D tiles of sqrt(chunk) x sqrt(chunk) at most) or "flat" (runs of `chunk` elements).
    transform: None, or "dct": the coefficients are those of the orthonormal DCT-II of every tile (DeMo).
    values: "bf16", "fp32", or "sign": one bit each, with the mean magnitude of every chunk as bf16.
    indices: "auto" is the shortest of those allowed; "u8" needs a chunk of at most 256.
    dense_below: tensors with fewer elements travel dense and untransformed; in bf16 where `values` is "sign".
    normalization: an average divides by the weight of all "contributors", or of the "senders" of a
        coefficient.
    update: what an average of sparse tensors holds: "coefficients", or "sign": the sign of every weight, the
        transform undone (needs "dct").
    clip: None, or "median": before the average each worker's tensor whose L2 norm is above the median of the
        workers' is scaled down to it (of an even number the lower of the two in the middle), as in templar's
        SparseLoCo.

    Raises ConfigError, naming the field, its value and what is allowed.
    """

    k: int = 64
    chunk: int = 4096
    layout: Literal["tiles", "flat"] = "tiles"
    transform: Literal["dct"] | None = None
    values: ValueKind = "bf16"
    indices: Literal["auto", "u8", "u16", "gap8"] = "auto"
    dense_below: int = 4096
    normalization: Literal["contributors", "senders"] = "contributors"
    update: Literal["coefficients", "sign"] = "coefficients"
    clip: Literal["median"] | None = None

    def __post_init__(self) -> None:
        _integer("TopK", "chunk", self.chunk, 1, MAX_CHUNK)
        _integer("TopK", "k", self.k, 1, self.chunk)
        _integer("TopK", "dense_below", self.dense_below, 0, None)
        _one_of("TopK", "layout", self.layout, ("tiles", "flat"))
        _one_of("TopK", "transform", self.transform, (None, "dct"))
        _one_of("TopK", "values", self.values, ("bf16", "fp32", "sign"))
        _one_of("TopK", "indices", self.indices, ("auto", "u8", "u16", "gap8"))
        _one_of("TopK", "normalization", self.normalization, ("contributors", "senders"))
        _one_of("TopK", "update", self.update, ("coefficients", "sign"))
        _one_of("TopK", "clip", self.clip, (None, "median"))
        if self.indices == "u8" and self.chunk > 256:
            raise ConfigError(f"TopK.indices = 'u8' needs a chunk of at most 256; chunk is {self.chunk}")
        if self.layout == "tiles" and math.isqrt(self.chunk) ** 2 != self.chunk:
            raise ConfigError(
                f"TopK.chunk = {self.chunk} with layout 'tiles': allowed are perfect squares (64, 256, 4096, ...);"
                " use layout 'flat' for any other"
            )
        if self.transform == "dct" and self.layout != "tiles":
            raise ConfigError("TopK.transform = 'dct' needs layout 'tiles'; layout is 'flat'")
        if self.update == "sign" and self.transform != "dct":
            raise ConfigError(
                "TopK.update = 'sign' needs transform 'dct': without it most weights would get the sign of 0"
            )


Scheme: TypeAlias = Dense | TopK


@dataclass(frozen=True)
class Encoded:
    """One tensor as bytes, all little-endian.

    values: bf16, float32 or single bits, per chunk in ascending index order.
    indices: chunk-relative, as `form` says; empty in DENSE and SIGN.
    counts: u16 entries per chunk in a sparse aggregate or a SIGN one, empty in a contribution.
    scales: bf16 magnitude per chunk of a sparse contribution with sign values, empty otherwise.
    """

    form: Form
    values: bytes
    indices: bytes = b""
    counts: bytes = b""
    scales: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of all four fields together."""
        return len(self.values) + len(self.indices) + len(self.counts) + len(self.scales)


def is_dense(scheme: Scheme, numel: int) -> bool:
    """Whether contributions of a tensor of `numel` elements travel in form DENSE."""
    return isinstance(scheme, Dense) or numel < scheme.dense_below or numel == 0


def whole_kind(scheme: Scheme) -> WholeKind:
    """What dense values are, and averages of sparse ones: bf16 where `values` is "sign"."""
    return "fp32" if scheme.values == "fp32" else "bf16"


def value_kind(scheme: Scheme, form: Form, *, aggregate: bool) -> ValueKind:
    """What the values of a tensor in `form` are."""
    if form is Form.SIGN or (scheme.values == "sign" and not aggregate and form is not Form.DENSE):
        return "sign"
    return whole_kind(scheme)


def index_forms(scheme: TopK) -> tuple[Form, ...]:
    """The forms that a sparse contribution under `scheme` may have, the preferred at equal length first."""
    if scheme.indices == "auto":
        return (Form.U8, Form.U16, Form.GAP8) if scheme.chunk <= 256 else (Form.U16, Form.GAP8)
    return (Form[scheme.indices.upper()],)


def _integer(owner: str, field: str, value: object, low: int, high: int | None) -> None:
    allowed = f"{low} <= {field} <= {high}" if high is not None else f"{field} >= {low}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{owner}.{field} = {value!r}: must be an integer, {allowed}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{owner}.{field} = {value}: allowed is {allowed}")


def _one_of(owner: str, field: str, value: object, allowed: tuple[Any, ...]) -> None:
    words = " or ".join(repr(each) for each in allowed)
    if value not in allowed:
        raise ConfigError(f"{owner}.{field} = {value!r}: allowed is {words}")
