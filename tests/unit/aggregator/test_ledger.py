"""What the ledger keeps, and what it refuses."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gradwire.codec import Dense, TopK
from gradwire.config import parse_config
from gradwire.errors import ConfigError, GradwireError
from gradwire.manifest import Entry, Manifest
from gradwire_aggregator.ledger import IDENTITY, Ledger, restore_plan
from gradwire_aggregator.plan import Plan, Returned
from gradwire_aggregator.record import RoundRecord
from gradwire_aggregator.rounds import Assignment
from gradwire_aggregator.store import Kept, Snapshot, Store

CONFIG = {"name": "one", "seed": 3, "batch": {"global_batch": 32, "inner_batch": 16}}


def identity(**changes: Any) -> dict[str, Any]:
    config = parse_config({**CONFIG, **changes}, source="test")
    return config.model_dump(include=set(IDENTITY), mode="json")


def record(number: int) -> RoundRecord:
    return RoundRecord(number, 1.5, 2, 32, 100, 50, loss=0.1 + number, held_out_loss=None)


def test_a_run_is_found_again_by_its_folder(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    assert first.open_run(identity(), b"c", b"id-1") == b"id-1"
    assert first.next_life() == 1
    first.close()
    again = Ledger(tmp_path)
    assert again.open_run(identity(), b"c", b"id-2") == b"id-1"
    assert again.next_life() == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "two"}, "name = 'two' here, 'one' there"),
        ({"seed": 4}, "seed = 4 here, 3 there"),
        ({"batch": {"global_batch": 64}}, "batch.global_batch = 64 here, 32 there"),
        ({"training": {}}, "training = .* here, None there"),
    ],
)
def test_the_data_of_another_run_is_refused_with_the_first_difference(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    first = Ledger(tmp_path)
    first.open_run(identity(), b"", b"id")
    with pytest.raises(ConfigError, match=f"holds another run: {words}.*another folder as --data"):
        first.open_run(identity(**changes), b"", b"id")
    with pytest.raises(ConfigError, match="the corpus is another one"):
        first.open_run(identity(), b"other", b"id")


def test_deadlines_and_rounds_may_be_changed_between_two_starts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.open_run(identity(), b"", b"id")
    assert ledger.open_run(identity(rounds=7, round={"deadline_s": 9.0}), b"", b"x") == b"id"


def test_rounds_plan_and_contributors_come_back(tmp_path: Path) -> None:
    ledger, plan = Ledger(tmp_path), Plan(inner_batch=4, attempts=3)
    ranges = plan.take(1, 8), plan.take(2, 8)
    plan.count(1)
    plan.give_back(2, "bob: late")
    plan.skipped.append(Returned(90, 94, 3, "ann: left"))
    ledger.add_round(record(0), [Assignment(1, "ann", ranges[0])], plan, Kept(0, 10, 99))
    ledger.add_round(record(1), [Assignment(5, "cid", ((16, 20),))], plan, Kept(1, 11, 98))
    ledger.close()
    past, restored = Ledger(tmp_path).past(1), Plan(inner_batch=4, attempts=3)
    assert (past.rounds, past.workers, past.history) == (2, ("cid",), [record(1)])
    assert past.plan is not None
    restore_plan(restored, past.plan)
    assert (restored.high_water, restored.counted.ranges) == (16, [(0, 8)])
    assert restored.pool == [Returned(8, 16, 1, "bob: late")]
    assert restored.skipped == [Returned(90, 94, 3, "ann: left")]
    assert restored.take(1, 4) == ((8, 12),)


def test_a_manifest_comes_back_whole(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    entries = tuple(Entry(f"t{n}", (n, 3), TopK(k=2) if n % 2 else Dense("fp32")) for n in range(1200))
    manifest = Manifest("gradients:SGD", entries)
    assert ledger.manifest() is None
    ledger.set_manifest(manifest, b"sha")
    assert ledger.manifest() == (manifest, b"sha")


def test_what_is_older_than_the_two_newest_snapshots_is_let_go_of(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(8):
        ledger.add_round(record(number), [], Plan(inner_batch=1, attempts=1), Kept(number, 5, number))
        if number in (2, 4, 6):
            ledger.add_snapshot(Snapshot(number, 7, b"sha", tmp_path / f"snapshot-{number}"))
    assert [each.round for each in ledger.snapshots()] == [4, 6]
    assert ledger.kept_aggregates() == [Kept(number, 5, number) for number in (4, 5, 6, 7)]
    assert ledger.past(3).rounds == 8


def test_a_round_is_written_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    plan = Plan(inner_batch=1, attempts=1)
    ledger.add_round(record(0), [], plan, Kept(0, 5, 1))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.add_round(record(0), [Assignment(1, "ann", ((0, 4),))], plan, Kept(0, 5, 2))
    assert ledger.kept_aggregates() == [Kept(0, 5, 1)]
    assert ledger.past(1).workers == ()


def test_a_second_aggregator_on_the_folder_is_refused(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    with pytest.raises(ConfigError, match="another aggregator may be using this folder"):
        Ledger(tmp_path)
    first.close()
    Ledger(tmp_path).close()


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    data = bytearray((tmp_path / "ledger.sqlite").read_bytes())
    data[:64] = b"x" * 64
    (tmp_path / "ledger.sqlite").write_bytes(data)
    with pytest.raises(GradwireError, match=r"ledger\.sqlite is damaged .*--data"):
        Ledger(tmp_path)


def test_a_ledger_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="schema version 99, this gradwire knows 1"):
        Ledger(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="can't write there"):
        Ledger(tmp_path / "taken")


MESSAGES = [b"header", b"part one", b"part two" * 1000, b"commit"]


def test_an_aggregate_is_the_same_after_a_restart_and_strays_are_deleted(tmp_path: Path) -> None:
    kept = Store(tmp_path).write_aggregate(3, MESSAGES)
    for stray in ("aggregate-000000004", "aggregate-000000005.partial", "snapshot-000000003-ab.partial"):
        (tmp_path / stray).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    again = Store(tmp_path, [kept])
    assert again.aggregate(3) == MESSAGES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aggregate-000000003", "notes.txt"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
@pytest.mark.parametrize("what", ["aggregate", "snapshot"])
def test_a_damaged_file_is_refused_by_name(what: str, damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = store.write_aggregate(3, MESSAGES)
    writer = store.receive_snapshot(3, 6, hashlib.sha256(b"state!").digest())
    writer.write(b"state!")
    snapshot = writer.finish()
    path = snapshot.path if what == "snapshot" else tmp_path / "aggregate-000000003"
    data = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(data[:-1])
        case _:
            path.write_bytes(data[:2] + b"?" + data[3:])
    problem = "is missing" if damage == "missing" else "is damaged"
    with pytest.raises(GradwireError, match=f"the {what} of round 3, .*{problem}.*--data"):
        Store(tmp_path, [kept], [snapshot])
