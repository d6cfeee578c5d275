"""The ordered, named tensors of a run with their schemes, and their fingerprint."""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from gradwire.codec import Dense, Scheme
from gradwire.errors import ManifestMismatch, ProtocolError

MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 1 << 48
MAX_NAME_BYTES = 1024


class Role(enum.IntEnum):
    """What a tensor is to the model. The numbers are those of the wire."""

    PARAMETER = 1
    BUFFER = 2


@dataclass(frozen=True)
class Entry:
    """One tensor: `scheme` says how it is compressed; a scalar's `shape` is ()."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    role: Role = Role.PARAMETER

    def __post_init__(self) -> None:
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES:
            raise ProtocolError(f"a tensor's name must have 1 to {MAX_NAME_BYTES} bytes, got {self.name[:40]!r}")
        if len(self.shape) > MAX_DIMENSIONS or self.elements >= MAX_ELEMENTS:
            raise ProtocolError(f"{self.name}: shape {list(self.shape)} is too large to be sent")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """All tensors that a run exchanges, in order, and the method they are exchanged for.

    Raises ProtocolError if a name stands twice or the list is over its bounds.
    """

    method: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if len(self.entries) > MAX_TENSORS:
            raise ProtocolError(f"a manifest has at most {MAX_TENSORS} tensors, this one has {len(self.entries)}")
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise ProtocolError(f"the manifest names {entry.name!r} twice")
            seen.add(entry.name)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def parameters(self) -> int:
        """Elements of all trained tensors."""
        return sum(entry.elements for entry in self.entries if entry.role is Role.PARAMETER)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over the byte layout that docs/protocol.md gives; 32 bytes."""
        digest = hashlib.sha256(b"gradwire-manifest-1\0")
        digest.update(_text(self.method) + struct.pack("<I", len(self.entries)))
        for entry in self.entries:
            digest.update(_text(entry.name) + struct.pack("<BB", entry.role, len(entry.shape)))
            digest.update(struct.pack(f"<{len(entry.shape)}Q", *entry.shape) + _scheme_bytes(entry.scheme))
        return digest.digest()

    def require_same(self, run: Manifest) -> None:
        """Raises ManifestMismatch with the first difference between this manifest and the run's."""
        difference = _first_difference(self, run)
        if difference:
            raise ManifestMismatch(f"this worker's model is not the run's. {difference}")


_VALUES = {"bf16": 1, "fp32": 2, "sign": 3}
_LAYOUTS = {"flat": 1, "tiles": 2}
_INDICES = {"auto": 1, "u8": 2, "u16": 3, "gap8": 4}
_NORMALIZATIONS = {"contributors": 1, "senders": 2}
_TRANSFORMS = {None: 1, "dct": 2}
_UPDATES = {"coefficients": 1, "sign": 2}
_CLIPS = {None: 1, "median": 2}


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<H", len(data)) + data


def _scheme_bytes(scheme: Scheme) -> bytes:
    if isinstance(scheme, Dense):
        return struct.pack("<BB", 1, _VALUES[scheme.values])
    return struct.pack(
        "<BIIBBBQBBBB",
        2,
        scheme.k,
        scheme.chunk,
        _LAYOUTS[scheme.layout],
        _VALUES[scheme.values],
        _INDICES[scheme.indices],
        scheme.dense_below,
        _NORMALIZATIONS[scheme.normalization],
        _TRANSFORMS[scheme.transform],
        _UPDATES[scheme.update],
        _CLIPS[scheme.clip],
    )


def _first_difference(here: Manifest, run: Manifest) -> str:
    if here.method != run.method:
        return f"method: {here.method} here, {run.method} in the run"
    for mine, theirs in zip(here.entries, run.entries, strict=False):
        if mine.name != theirs.name:
            return f"tensor {mine.name!r} here, {theirs.name!r} in its place in the run"
        if mine.shape != theirs.shape:
            return f"{mine.name}: {list(mine.shape)} here, {list(theirs.shape)} in the run"
        if mine.scheme != theirs.scheme:
            return f"{mine.name}: {mine.scheme} here, {theirs.scheme} in the run"
        if mine.role != theirs.role:
            return f"{mine.name}: {mine.role.name.lower()} here, {theirs.role.name.lower()} in the run"
    if len(here) > len(run):
        return f"{here.entries[len(run)]} here, no such tensor in the run"
    if len(here) < len(run):
        return f"{run.entries[len(here)]} in the run, no such tensor here"
    return ""
