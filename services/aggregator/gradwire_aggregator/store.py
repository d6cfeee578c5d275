"""Aggregates and snapshots of a run, as files in one folder.

An aggregate is kept as the very messages that every worker gets, so that handing it out again costs a read. Nothing
below the older of the two newest snapshots is kept. A file has its name only once all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from gradwire.errors import GradwireError, ProtocolError, RoundGone

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Kept:
    """The file of a round's aggregate."""

    round: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Snapshot:
    """The state at a round, in a file of safetensors bytes."""

    round: int
    size: int
    sha256: bytes
    path: Path


class Store:
    """What workers may ask for again.

    aggregates, snapshots: what the folder is known to hold, oldest first; other files of this kind are deleted: they
    were written by a process that died before it had entered them.
    Raises GradwireError, with what to do, for a file that is missing or damaged.
    """

    def __init__(self, folder: Path, aggregates: Iterable[Kept] = (), snapshots: Iterable[Snapshot] = ()) -> None:
        self._folder = folder
        self._newest: tuple[int, list[bytes]] | None = None
        self.snapshots = list(snapshots)
        self._aggregates = {each.round: self._path(each.round) for each in aggregates}
        known = {*self._aggregates.values(), *(each.path for each in self.snapshots)}
        for path in (*folder.glob("aggregate-*"), *folder.glob("snapshot-*")):
            if path not in known:
                path.unlink()
        for each in aggregates:
            _check(self._path(each.round), f"the aggregate of round {each.round}", each.size, crc32=each.crc32)
        for snapshot in self.snapshots:
            _check(snapshot.path, f"the snapshot of round {snapshot.round}", snapshot.size, sha256=snapshot.sha256)

    def write_aggregate(self, round_: int, messages: Sequence[bytes]) -> Kept:
        """Writes the serialized messages of a round's aggregate; for a thread. Raises OSError."""
        path, size, crc32 = self._path(round_), 0, 0
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            for message in messages:
                for data in (_LENGTH.pack(len(message)), message):
                    file.write(data)
                    size, crc32 = size + len(data), zlib.crc32(data, crc32)
            _sync(file)
        _rename(partial, path)
        return Kept(round_, size, crc32)

    def keep_aggregate(self, round_: int, messages: Sequence[bytes]) -> None:
        """From now on hands out an aggregate that was written."""
        self._aggregates[round_] = self._path(round_)
        self._newest = (round_, list(messages))

    def aggregate(self, round_: int) -> list[bytes]:
        """The messages of a round's aggregate. Raises RoundGone where it is no longer kept."""
        if self._newest is not None and self._newest[0] == round_:
            return self._newest[1]
        path = self._aggregates.get(round_)
        if path is None:
            raise RoundGone(f"the aggregate of round {round_} is no longer kept")
        data = path.read_bytes()
        messages, at = [], 0
        while at < len(data):
            (length,) = _LENGTH.unpack_from(data, at)
            messages.append(data[at + _LENGTH.size : at + _LENGTH.size + length])
            at += _LENGTH.size + length
        return messages

    @property
    def oldest_round(self) -> int | None:
        """The oldest round whose aggregate is kept."""
        return min(self._aggregates, default=None)

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot."""
        return self.snapshots[-1] if self.snapshots else None

    def _path(self, round_: int) -> Path:
        return self._folder / f"aggregate-{round_:09}"

    def receive_snapshot(self, round_: int, size: int, sha256: bytes) -> SnapshotWriter:
        """A writer for a snapshot that is arriving."""
        name = f"snapshot-{round_:09}-{secrets.token_hex(4)}"  # two may arrive for one round
        return SnapshotWriter(self._folder / name, round_, size, sha256)

    def put_snapshot(self, snapshot: Snapshot) -> None:
        """Makes a received snapshot the newest, and drops what no joiner will need."""
        older = self.snapshots
        self.snapshots = [*older[-1:], snapshot]
        for old in older[:-1]:
            old.path.unlink()
        for round_ in [r for r in self._aggregates if r < self.snapshots[0].round]:
            self._aggregates.pop(round_).unlink()


class SnapshotWriter:
    """Writes a snapshot as it arrives, and looks at it only when all of it is there."""

    def __init__(self, path: Path, round_: int, size: int, sha256: bytes) -> None:
        self._snapshot = Snapshot(round_, size, sha256, path)
        self._digest = hashlib.sha256()
        self._written = 0
        self._partial = path.with_name(path.name + ".partial")
        self._file: BinaryIO = self._partial.open("wb")

    def write(self, data: bytes) -> None:
        """Adds bytes. Raises ProtocolError once there are more than were announced."""
        self._written += len(data)
        if self._written > self._snapshot.size:
            raise ProtocolError(f"a snapshot is longer than the {self._snapshot.size} bytes it was announced with")
        self._digest.update(data)
        self._file.write(data)

    def finish(self) -> Snapshot:
        """The snapshot. Raises ProtocolError unless what arrived is what was announced."""
        if self._written != self._snapshot.size or self._digest.digest() != self._snapshot.sha256:
            raise ProtocolError("a snapshot arrived that is not what its header announced")
        _sync(self._file)
        self._file.close()
        _rename(self._partial, self._snapshot.path)
        return self._snapshot

    def abandon(self) -> None:
        """Throws away what arrived."""
        self._file.close()
        self._partial.unlink(missing_ok=True)
        self._snapshot.path.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rename(partial: Path, path: Path) -> None:
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check(path: Path, what: str, size: int, *, crc32: int | None = None, sha256: bytes | None = None) -> None:
    crc, digest, found = 0, hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                found += len(piece)
                crc = zlib.crc32(piece, crc)
                digest.update(piece)
    except FileNotFoundError:
        problem = "is missing"
    else:
        same = crc32 in (None, crc) and sha256 in (None, digest.digest())
        problem = "" if found == size and same else f"is damaged: {found} bytes, {size} were written"
    if problem:
        raise GradwireError(
            f"{what}, {path}, {problem}. Restore the folder from a backup, or start a new run in another folder with "
            "--data"
        )
