"""Aggregates and snapshots of a run, as files in one folder.

An aggregate is kept as the very messages that every worker gets, so that handing it out again costs a read. Nothing
below the older of the two newest snapshots is kept.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from gradwire.errors import ProtocolError, RoundGone

_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True)
class Snapshot:
    """The state at a round, in a file of safetensors bytes."""

    round: int
    size: int
    sha256: bytes
    path: Path


class Store:
    """What workers may ask for again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._aggregates: dict[int, Path] = {}
        self._newest: tuple[int, list[bytes]] | None = None
        self.snapshots: list[Snapshot] = []

    def write_aggregate(self, round_: int, messages: Sequence[bytes]) -> Path:
        """Writes the serialized messages of a round's aggregate; for a thread."""
        path = self._folder / f"aggregate-{round_:09}"
        with path.open("wb") as file:
            for message in messages:
                file.write(_LENGTH.pack(len(message)) + message)
        return path

    def keep_aggregate(self, round_: int, path: Path, messages: Sequence[bytes]) -> None:
        """From now on hands out an aggregate that was written."""
        self._aggregates[round_] = path
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

    def receive_snapshot(self, round_: int, size: int, sha256: bytes) -> SnapshotWriter:
        """A writer for a snapshot that is arriving."""
        name = f"snapshot-{round_:09}-{secrets.token_hex(4)}"
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
        self._file: BinaryIO = path.open("wb")

    def write(self, data: bytes) -> None:
        """Adds bytes. Raises ProtocolError once there are more than were announced."""
        self._written += len(data)
        if self._written > self._snapshot.size:
            raise ProtocolError(f"a snapshot is longer than the {self._snapshot.size} bytes it was announced with")
        self._digest.update(data)
        self._file.write(data)

    def finish(self) -> Snapshot:
        """The snapshot. Raises ProtocolError unless what arrived is what was announced."""
        self._file.close()
        if self._written != self._snapshot.size or self._digest.digest() != self._snapshot.sha256:
            raise ProtocolError("a snapshot arrived that is not what its header announced")
        return self._snapshot

    def abandon(self) -> None:
        """Throws away what arrived."""
        self._file.close()
        self._snapshot.path.unlink(missing_ok=True)
