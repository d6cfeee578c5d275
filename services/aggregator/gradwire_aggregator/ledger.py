"""What has to survive a kill -9: a run's identity, its rounds and samples, and which files hold its data. SQLite.

A round's row is written after its aggregate is in a file, and before any worker hears of either; so a file without a
row is nothing, and its round is open again. Everything is committed with synchronous=FULL before the call returns.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gradwire.errors import ConfigError, GradwireError
from gradwire.manifest import Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire.schemas import entry_batches, entry_from_message
from gradwire_aggregator.plan import Plan, RangeSet, Returned
from gradwire_aggregator.record import RoundRecord
from gradwire_aggregator.rounds import Assignment
from gradwire_aggregator.store import Kept, Snapshot

NAME: Final = "ledger.sqlite"
SCHEMA: Final = 1
TABLES: Final = (
    "CREATE TABLE facts (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    # size and CRC of the aggregate's file; NULL once it is no longer kept
    "CREATE TABLE rounds (round INTEGER PRIMARY KEY, record TEXT NOT NULL, size INTEGER, crc32 INTEGER)",
    # what counted, and nothing else
    "CREATE TABLE contributions (round INTEGER NOT NULL, worker TEXT NOT NULL, assignment INTEGER NOT NULL,"
    " samples INTEGER NOT NULL, ranges TEXT NOT NULL, PRIMARY KEY (round, worker, assignment)) WITHOUT ROWID",
    "CREATE TABLE workers (incarnation BLOB PRIMARY KEY, name TEXT NOT NULL, device TEXT NOT NULL,"
    " joined REAL NOT NULL) WITHOUT ROWID",
    "CREATE TABLE snapshots (round INTEGER PRIMARY KEY, size INTEGER NOT NULL, sha256 BLOB NOT NULL,"
    " file TEXT NOT NULL)",
)
# What a run is. The rest of a config may be changed between two starts.
IDENTITY: Final = ("name", "seed", "batch", "training")


@dataclass(frozen=True)
class Past:
    """What a ledger holds of the rounds that are over."""

    rounds: int  # how many are over
    plan: dict[str, Any] | None
    workers: tuple[str, ...]  # whose contributions the last of them had
    history: list[RoundRecord]


class Ledger:
    """The ledger in a folder, made if there is none. One process at a time.

    Raises ConfigError where the folder can't be used, is another process's, or holds a newer schema; GradwireError
    where the ledger is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, timeout=0.5, isolation_level=None)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():  # takes the lock, for as long as the process lives
                if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for statement in TABLES:
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {SCHEMA}")
            problem = self._db.execute("PRAGMA quick_check").fetchone()[0]
            schema = self._db.execute("PRAGMA user_version").fetchone()[0]
        except OSError as error:
            raise ConfigError(f"--data {folder}: can't write there: {error.strerror}") from error
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"--data {folder}: the ledger can't be opened ({error}); another aggregator may be using this folder"
            ) from error
        except sqlite3.DatabaseError as error:
            raise GradwireError(self._damaged(str(error))) from error
        if problem != "ok":
            raise GradwireError(self._damaged(problem))
        if schema != SCHEMA:
            raise ConfigError(
                f"{self._path} has schema version {schema}, this gradwire knows {SCHEMA}: use the version that wrote "
                "it, or give another folder as --data"
            )

    def close(self) -> None:
        """Gives the folder free."""
        self._db.close()

    # The run.

    def open_run(self, identity: dict[str, Any], corpus: bytes, run_id: bytes) -> bytes:
        """Enters a run, or finds it there; its id, `run_id` where it is new.

        identity: the config's keys in `IDENTITY`. Raises ConfigError with the first difference if the ledger is of
        another run, or its workers trained on other data.
        """
        with self._transaction():
            kept = self._fact("run_id")
            if kept is None:
                self._set("identity", json.dumps(identity).encode())
                self._set("corpus", corpus)
                self._set("run_id", run_id)
        if kept is None:
            return run_id
        before = json.loads(self._fact("identity") or b"{}")
        difference = _first_difference(before, json.loads(json.dumps(identity)))
        if not difference and corpus != self._fact("corpus"):
            difference = "the corpus is another one"
        if difference:
            raise ConfigError(
                f"{self._path.parent} holds another run: {difference}. Give the config it was made with, or another "
                "folder as --data"
            )
        return kept

    def next_life(self) -> int:
        """How often this run has been started, this time included."""
        with self._transaction():
            lives = int(self._fact("lives") or b"0") + 1
            self._set("lives", str(lives).encode())
        return lives

    def set_manifest(self, manifest: Manifest, data_sha256: bytes) -> None:
        """What is trained, once there are weights of it."""
        with self._transaction():
            self._set("method", manifest.method.encode())
            for number, batch in enumerate(entry_batches(manifest)):
                self._set(f"entries/{number:06}", pb.ManifestEntries(entries=batch).SerializeToString())
            self._set("data_sha256", data_sha256)

    def manifest(self) -> tuple[Manifest, bytes] | None:
        """The manifest and the fingerprint of the data; None before there are weights."""
        method = self._fact("method")
        if method is None:
            return None
        batches = self._db.execute("SELECT value FROM facts WHERE key LIKE 'entries/%' ORDER BY key").fetchall()
        entries = [
            entry_from_message(message)
            for (data,) in batches
            for message in pb.ManifestEntries.FromString(data).entries
        ]
        return Manifest(method.decode(), tuple(entries)), self._fact("data_sha256") or b""

    def add_worker(self, name: str, incarnation: bytes, device: str) -> None:
        """A process life of a worker."""
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO workers VALUES (?, ?, ?, ?)", (incarnation, name, device, time.time())
            )

    # Rounds.

    def add_round(self, record: RoundRecord, counted: Sequence[Assignment], plan: Plan, kept: Kept) -> None:
        """A round is over, and its aggregate is in a file. From here on its samples count."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?)",
                (record.round, json.dumps(asdict(record)), kept.size, kept.crc32),
            )
            self._db.executemany(
                "INSERT INTO contributions VALUES (?, ?, ?, ?, ?)",
                [(record.round, a.worker, a.id, a.samples, json.dumps(a.ranges)) for a in counted],
            )
            self._set("plan", json.dumps(_plan_state(plan)).encode())

    def past(self, history: int) -> Past:
        """The rounds that are over; the records of the last `history` of them."""
        (rounds,) = self._db.execute("SELECT COUNT(*) FROM rounds").fetchone()
        records = self._db.execute("SELECT record FROM rounds ORDER BY round DESC LIMIT ?", (history,)).fetchall()
        workers = self._db.execute(
            "SELECT DISTINCT worker FROM contributions WHERE round = ?", (rounds - 1,)
        ).fetchall()
        plan = self._fact("plan")
        return Past(
            rounds=rounds,
            plan=json.loads(plan) if plan else None,
            workers=tuple(name for (name,) in workers),
            history=[RoundRecord(**json.loads(record)) for (record,) in reversed(records)],
        )

    # Files.

    def kept_aggregates(self) -> list[Kept]:
        """The aggregates whose files are kept, oldest first."""
        rows = self._db.execute("SELECT round, size, crc32 FROM rounds WHERE size IS NOT NULL ORDER BY round")
        return [Kept(*row) for row in rows]

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """A snapshot is in a file. What no joiner will need any more is let go of: unlink it afterwards."""
        with self._transaction():
            row = (snapshot.round, snapshot.size, snapshot.sha256, snapshot.path.name)
            self._db.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)
            self._db.execute(
                "DELETE FROM snapshots WHERE round NOT IN (SELECT round FROM snapshots ORDER BY round DESC LIMIT 2)"
            )
            self._db.execute(
                "UPDATE rounds SET size = NULL, crc32 = NULL WHERE round < (SELECT MIN(round) FROM snapshots)"
            )

    def snapshots(self) -> list[Snapshot]:
        """The snapshots whose files are kept, oldest first."""
        rows = self._db.execute("SELECT round, size, sha256, file FROM snapshots ORDER BY round")
        return [Snapshot(number, size, digest, self._path.parent / file) for number, size, digest, file in rows]

    def _fact(self, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def _set(self, key: str, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, value))

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)

    def _damaged(self, problem: str) -> str:
        return (
            f"{self._path} is damaged ({problem}): restore the folder from a backup, or start a new run in another "
            "folder with --data"
        )


class _Transaction:
    """All or nothing, written down when it ends."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._db.execute("COMMIT" if kind is None else "ROLLBACK")


def restore_plan(plan: Plan, state: dict[str, Any]) -> None:
    """Gives a new plan the state of one that a ledger holds."""
    plan.high_water = state["high_water"]
    plan.counted = RangeSet([(start, stop) for start, stop in state["counted"]])
    plan.pool = [Returned(*each) for each in state["pool"]]
    plan.skipped = [Returned(*each) for each in state["skipped"]]


def _plan_state(plan: Plan) -> dict[str, Any]:
    return {
        "high_water": plan.high_water,
        "counted": plan.counted.ranges,
        "pool": [[each.start, each.stop, each.attempts, each.reason] for each in plan.pool],
        "skipped": [[each.start, each.stop, each.attempts, each.reason] for each in plan.skipped],
    }


def _first_difference(before: Any, now: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            found = _first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return ""
    return "" if before == now else f"{path} = {now!r} here, {before!r} there"
