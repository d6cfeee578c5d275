"""The aggregator is killed with SIGKILL and started again: the run ends as if nothing had happened, to the bit."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults.ledgers import assert_nothing_lost_nothing_twice
from processes import Process, aggregator, process, tiny_config, worker

DYING = str(Path(__file__).with_name("dying.py"))
ROUNDS = 30
METHODS = {"sparseloco": {}, "dense": {"values": "fp32"}}
POINTS = [
    "in an upload",
    "after a commit",
    "before the average",
    "before the file",
    "between file and ledger",
    "between ledger and broadcast",
    "in the broadcast",
    "before a snapshot is entered",
    "before old files are unlinked",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_in(folder: Path, method: str, rounds: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return tiny_config(
        folder, rounds=rounds, min_workers=2, method=method, port=free_port(), lease_s=20.0, **METHODS[method]
    )


@contextlib.contextmanager
def workers(address: str, folder: Path) -> Iterator[list[Process]]:
    with contextlib.ExitStack() as stack:
        options = ("--give-up-after", "120", "--checkpoint", str(folder))
        yield [stack.enter_context(worker(address, name, *options)) for name in ("ann", "bob")]


def weights_in(folder: Path, name: str = "ann") -> dict[str, torch.Tensor]:
    return {k: v for k, v in load_file(folder / f"{name}.safetensors").items() if k.startswith("weight/")}


def undisturbed(folder: Path, method: str, rounds: int) -> dict[str, torch.Tensor]:
    """The weights of a run that nothing happens to."""
    config = config_in(folder, method, rounds)
    with aggregator(config, "--data", str(folder / "data")) as (server, address), workers(address, folder) as both:
        assert [each.wait() for each in both] == [0, 0]
        assert server.wait() == 0
    return weights_in(folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def weights(method: str, rounds: int) -> dict[str, torch.Tensor]:
        if (method, rounds) not in known:
            known[method, rounds] = undisturbed(tmp_path_factory.mktemp("undisturbed"), method, rounds)
        return known[method, rounds]

    return weights


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    for name in ("ann", "bob"):
        found = weights_in(folder, name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (name, key)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point_of_a_round_it_goes_on_as_if_it_had_not_been(
    point: str, method: str, tmp_path: Path, expected: Any
) -> None:
    config, data = config_in(tmp_path, method, ROUNDS), tmp_path / "data"
    with process(DYING, point, "11", str(config), "--data", str(data)) as first:
        address = first.wait_for("listening on").rpartition(" ")[2].strip()
        with workers(address, tmp_path) as both:
            assert first.wait() == -signal.SIGKILL
            with aggregator(config, "--data", str(data)) as (second, _):
                assert [each.wait() for each in both] == [0, 0], both[0].text
                assert second.wait() == 0
    assert "started again, at round" in second.text
    assert_same(tmp_path, expected(method, ROUNDS))
    assert_nothing_lost_nothing_twice(data, rounds=ROUNDS, samples=ROUNDS * 16)


@pytest.mark.timeout(500)
@pytest.mark.parametrize("method", METHODS)
def test_killed_thirty_times_at_random_moments_it_ends_with_the_same_weights(
    method: str, tmp_path: Path, expected: Any
) -> None:
    rounds, kills, chance = 400, 30, random.Random(f"moments of {method}")
    config, data = config_in(tmp_path, method, rounds), tmp_path / "data"
    killed = 0
    with contextlib.ExitStack() as stack:
        both: list[Process] = []
        while True:
            with aggregator(config, "--data", str(data)) as (server, address):
                both = both or stack.enter_context(workers(address, tmp_path))
                if killed == kills:
                    assert [each.wait(200) for each in both] == [0, 0], both[0].text
                    assert server.wait() == 0
                    break
                # Some rounds, and then any moment of the next.
                try:
                    server.wait_for("counted:")
                except TimeoutError as error:
                    logs = "\n\n".join("\n".join(each.output[-15:]) for each in both)
                    raise TimeoutError(f"{error}\n\n{logs}") from error
                threading.Event().wait(chance.uniform(0, 0.3))
                server.signal(signal.SIGKILL)
                server.wait()
                killed += 1
    assert_same(tmp_path, expected(method, rounds))
    assert_nothing_lost_nothing_twice(data, rounds=rounds, samples=rounds * 16)
