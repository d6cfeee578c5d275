"""Manifest entries and schemes as protobuf, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeVar

from gradwire.codec import Dense, Scheme, TopK
from gradwire.codec.scheme import ValueKind, WholeKind
from gradwire.errors import ConfigError, ProtocolError
from gradwire.manifest import Entry, Manifest, Role
from gradwire.v1 import tensors_pb2 as pb

ENTRIES_PER_MESSAGE: Final = 512

_WHOLE_VALUES: Final[dict[WholeKind, pb.ValueType.ValueType]] = {
    "bf16": pb.VALUE_TYPE_BF16,
    "fp32": pb.VALUE_TYPE_FP32,
}
_VALUES: Final[dict[ValueKind, pb.ValueType.ValueType]] = {
    "bf16": pb.VALUE_TYPE_BF16,
    "fp32": pb.VALUE_TYPE_FP32,
    "sign": pb.VALUE_TYPE_SIGN,
}
_TRANSFORMS: Final[dict[Literal["dct"] | None, pb.Transform.ValueType]] = {
    None: pb.TRANSFORM_NONE,
    "dct": pb.TRANSFORM_DCT,
}
_UPDATES: Final[dict[Literal["coefficients", "sign"], pb.Update.ValueType]] = {
    "coefficients": pb.UPDATE_COEFFICIENTS,
    "sign": pb.UPDATE_SIGN,
}
_CLIPS: Final[dict[Literal["median"] | None, pb.Clip.ValueType]] = {
    None: pb.CLIP_NONE,
    "median": pb.CLIP_MEDIAN,
}
_LAYOUTS: Final[dict[Literal["tiles", "flat"], pb.ChunkLayout.ValueType]] = {
    "flat": pb.CHUNK_LAYOUT_FLAT,
    "tiles": pb.CHUNK_LAYOUT_TILES,
}
_INDICES: Final[dict[Literal["auto", "u8", "u16", "gap8"], pb.IndexForm.ValueType]] = {
    "auto": pb.INDEX_FORM_AUTO,
    "u8": pb.INDEX_FORM_U8,
    "u16": pb.INDEX_FORM_U16,
    "gap8": pb.INDEX_FORM_GAP8,
}
_NORMALIZATIONS: Final[dict[Literal["contributors", "senders"], pb.Normalization.ValueType]] = {
    "contributors": pb.NORMALIZATION_CONTRIBUTORS,
    "senders": pb.NORMALIZATION_SENDERS,
}


def entry_to_message(entry: Entry) -> pb.ManifestEntry:
    """The message for one entry of a manifest."""
    return pb.ManifestEntry(
        name=entry.name,
        shape=entry.shape,
        scheme=_scheme_to_message(entry.scheme),
        role=pb.Role.ValueType(entry.role),
    )


def entry_from_message(message: pb.ManifestEntry) -> Entry:
    """The entry in a message. Raises ProtocolError where it has a field that means nothing here."""
    try:
        role = Role(message.role)
    except ValueError:
        raise ProtocolError(f"{message.name}: role {message.role} is unknown") from None
    return Entry(message.name, tuple(message.shape), _scheme_from_message(message), role)


def entry_batches(manifest: Manifest) -> Iterator[list[pb.ManifestEntry]]:
    """All entries in messages of bounded size."""
    for start in range(0, len(manifest), ENTRIES_PER_MESSAGE):
        batch = manifest.entries[start : start + ENTRIES_PER_MESSAGE]
        yield [entry_to_message(entry) for entry in batch]


def _scheme_to_message(scheme: Scheme) -> pb.Scheme:
    if isinstance(scheme, Dense):
        return pb.Scheme(dense=pb.DenseScheme(values=_WHOLE_VALUES[scheme.values]))
    return pb.Scheme(
        top_k=pb.TopKScheme(
            k=scheme.k,
            chunk=scheme.chunk,
            layout=_LAYOUTS[scheme.layout],
            values=_VALUES[scheme.values],
            indices=_INDICES[scheme.indices],
            dense_below=scheme.dense_below,
            normalization=_NORMALIZATIONS[scheme.normalization],
            transform=_TRANSFORMS[scheme.transform],
            update=_UPDATES[scheme.update],
            clip=_CLIPS[scheme.clip],
        )
    )


def _scheme_from_message(entry: pb.ManifestEntry) -> Scheme:
    message = entry.scheme
    try:
        match message.WhichOneof("kind"):
            case "dense":
                return Dense(values=_word(_WHOLE_VALUES, message.dense.values))
            case "top_k":
                top_k = message.top_k
                return TopK(
                    k=top_k.k,
                    chunk=top_k.chunk,
                    layout=_word(_LAYOUTS, top_k.layout),
                    values=_word(_VALUES, top_k.values),
                    indices=_word(_INDICES, top_k.indices),
                    dense_below=top_k.dense_below,
                    normalization=_word(_NORMALIZATIONS, top_k.normalization),
                    transform=_word(_TRANSFORMS, top_k.transform),
                    update=_word(_UPDATES, top_k.update),
                    clip=_word(_CLIPS, top_k.clip),
                )
            case _:
                raise ProtocolError("its scheme is of a kind unknown here")
    except (ConfigError, ProtocolError) as error:
        raise ProtocolError(f"{entry.name}: {error}") from error


Word = TypeVar("Word")


def _word(table: Mapping[Word, int], number: int) -> Word:
    for word, known in table.items():
        if known == number:
            return word
    raise ProtocolError(f"its scheme has the number {number} where one of {sorted(table.values())} is meant")
