"""The disk of the aggregator's data is full: the run stops with the reason, and goes on when there is room."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.ledgers import assert_nothing_lost_nothing_twice
from faults.test_aggregator_killed import free_port
from processes import aggregator, tiny_config, worker

ROUNDS = 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds eight megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk can't be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=False)


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(tmp_path: Path, small_disk: Path) -> None:
    config, data = tiny_config(tmp_path, rounds=ROUNDS, port=free_port(), dim=32), small_disk / "data"
    filler = small_disk / "filler"
    with (
        aggregator(config, "--data", str(data)) as (server, address),
        worker(address, "ann", "--give-up-after", "60") as ann,
    ):
        server.wait_for("round 5 counted")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 1024)
        assert server.wait() == 1
        assert "can't be written down" in server.text
        assert "start the aggregator again with the same --data" in server.text
        assert "Traceback" not in server.text
        filler.unlink()
        with aggregator(config, "--data", str(data)) as (again, _):
            assert ann.wait(30) == 0, (ann.text, again.text)
            assert again.wait() == 0
    assert_nothing_lost_nothing_twice(data, rounds=ROUNDS, samples=ROUNDS * 16)
