"""What a run's ledger has to say at its end."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from pathlib import Path


def assert_nothing_lost_nothing_twice(data: Path, *, rounds: int, samples: int | None = None) -> None:
    """What counted is disjoint, and with what was skipped and is in the pool has no gap; samples: how many counted."""
    with contextlib.closing(sqlite3.connect(data / "ledger.sqlite")) as db:
        counted = [tuple(r) for (text,) in db.execute("SELECT ranges FROM contributions") for r in json.loads(text)]
        (plan,) = db.execute("SELECT value FROM facts WHERE key = 'plan'").fetchone()
        assert db.execute("SELECT COUNT(*), MAX(round) FROM rounds").fetchone() == (rounds, rounds - 1)
    state = json.loads(plan)
    set_aside = [*state["pool"], *state["skipped"]]
    everything = sorted([*counted, *((start, stop) for start, stop, *_ in set_aside)])
    assert everything[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(everything))
    assert everything[-1][1] == state["high_water"]
    assert all(reason for *_, reason in state["skipped"])
    if samples is not None:
        assert sum(stop - start for start, stop in counted) == samples
