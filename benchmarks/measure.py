"""One scenario: the real aggregator and the bare server on one host, the workers on others, in turns."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks import links, machine, prepare
from benchmarks.recorded import read_messages, write_messages

LOADS: Final = 2  # processes that play the workers, each on a host of its own
HEAD_START_S: Final = 0.05  # from the order to start to the start
ROOT: Final = Path(__file__).resolve().parent.parent

CONFIG: Final = """
name = "benchmark"
rounds = 1000000
[batch]
global_batch = {samples}
inner_batch = 16
shares = "fixed"
[round]
min_workers = {workers}
gather_s = 60.0
deadline_s = 600.0
lease_s = 180.0
snapshot_every = 1000000
"""


@dataclass(frozen=True)
class Timing:
    """One round, in seconds: from the first byte sent to the last received, and its three legs."""

    total: float
    upload: float  # to the last answer to a contribution
    between: float  # to the first byte of an aggregate
    download: float


@dataclass
class Scenario:
    """What was measured over one link with so many workers."""

    link: str
    workers: int
    up_bytes: int = 0  # of all workers together
    down_bytes: int = 0
    ours: list[Timing] = field(default_factory=list)
    bare: list[Timing] = field(default_factory=list)
    averaging_s: list[float] = field(default_factory=list)  # the aggregator's own figure for each round
    aggregator_cpu_s: float = 0.0  # a round
    bare_cpu_s: float = 0.0  # of the bare server, a round
    base_memory: int | None = None
    peak_memory: int | None = None
    other_cores: float | None = None

    @property
    def ratio(self) -> float:
        """Median round over median bare round."""
        return median(self.ours).total / median(self.bare).total

    @property
    def best_ratio(self) -> float:
        """Fastest round over fastest bare round: what other programs disturbed least."""
        return min(each.total for each in self.ours) / min(each.total for each in self.bare)


def median(timings: list[Timing]) -> Timing:
    """The median of each figure."""
    return Timing(*(statistics.median(column) for column in zip(*map(_figures, timings), strict=True)))


def run(
    link: str,
    round_: prepare.Contributions,
    expected: prepare.Aggregate,
    repeats: int,
    say: Callable[[str], None],
) -> Scenario:
    """Measures rounds through the aggregator and through the bare server, alternately.

    Raises RuntimeError where the aggregate is not `expected`, to the byte, or a process fails.
    """
    workers = len(round_.messages)
    loads = min(LOADS, workers)
    result = Scenario(link, workers)
    with contextlib.ExitStack() as stack:
        server, *hosts = stack.enter_context(links.hosts(link, 1 + loads))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-bench-")))
        aggregator, address, http = _start_aggregator(stack, server, folder, workers)
        before = machine.memory(aggregator.pid)
        machine.forget_peak(aggregator.pid)
        players = [_Player(stack, host) for host in hosts]
        _join(players, round_, folder, address)
        bare_server = _Bare(stack, server, folder, workers)
        _together(players, {"do": "begin", "round": 0})
        _check(_round(players, "round", 0)[1], expected)  # warms up; what it downloads is what `bare` moves
        bare_server.start(players)
        _round(players, "bare_round", 0)
        others = machine.OtherLoad(machine.children())
        bare_before = machine.cpu_seconds(bare_server.pid)
        for number in range(1, repeats + 1):
            say(f"{link}, {workers} workers: round {number} of {repeats}")
            _together(players, {"do": "begin", "round": number})
            spent, averaging = machine.cpu_seconds(aggregator.pid), players[0].averaging_s(http)
            timing, digests = _round(players, "round", number)
            _check(digests, expected)
            result.ours.append(timing)
            result.averaging_s.append(players[0].averaging_s(http) - averaging)
            result.aggregator_cpu_s += (machine.cpu_seconds(aggregator.pid) - spent) / repeats
            result.bare.append(_round(players, "bare_round", number)[0])
        result.other_cores = others.cores()
        result.bare_cpu_s = (machine.cpu_seconds(bare_server.pid) - bare_before) / repeats
        after = machine.memory(aggregator.pid)
        if before and after:
            result.base_memory, result.peak_memory = before.resident, after.peak
        result.up_bytes = sum(len(each) for messages in round_.messages for each in messages)
        result.down_bytes = workers * sum(len(each) for each in bare_server.messages)
        _together(players, {"do": "leave"})
    return result


class _Process:
    """A child that answers lines; it is ended with the stack."""

    def __init__(self, stack: contextlib.ExitStack, host: links.Host, *command: str) -> None:
        self._name = " ".join(command[:2])
        self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GRADWIRE_")}
        self._child = subprocess.Popen(
            [*host.prefix, *_with_parent(), sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.pid = self._child.pid
        stack.callback(self._end)

    def line(self) -> str:
        """Its next line. Raises RuntimeError if it has ended."""
        line = self._child.stdout.readline() if self._child.stdout else ""
        if not line:
            status = self._child.wait(timeout=10)
            self._errors.seek(0)
            raise RuntimeError(f"{self._name} ended with status {status}:\n{self._errors.read()[-2000:]}")
        return line.strip()

    def write(self, line: str) -> None:
        """Sends it a line."""
        if self._child.stdin:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()

    def _end(self) -> None:
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class _Player(_Process):
    """A process that plays workers."""

    def __init__(self, stack: contextlib.ExitStack, host: links.Host) -> None:
        super().__init__(stack, host, "benchmarks.load")

    def send(self, command: dict[str, Any]) -> None:
        """Gives it a command."""
        self.write(json.dumps(command))

    def answer(self) -> Any:
        """Its answer. Raises RuntimeError if that is an error."""
        answer = json.loads(self.line())
        if "error" in answer:
            raise RuntimeError(f"a worker of the benchmark failed: {answer['error']}")
        return answer["ok"]

    def averaging_s(self, http: str) -> float:
        """Seconds that the aggregator has spent averaging so far, as its /metrics says."""
        self.send({"do": "metrics", "address": http})
        return float(self.answer().get("averaging", 0.0))


class _Bare:
    """The bare server; it starts once there is an aggregate to hand out."""

    def __init__(self, stack: contextlib.ExitStack, host: links.Host, folder: Path, workers: int) -> None:
        self._stack, self._host, self._workers = stack, host, workers
        self._path = folder / "aggregate"
        self.messages: list[bytes] = []
        self.pid = 0

    def start(self, players: list[_Player]) -> None:
        """Takes over what was downloaded last, and connects everybody."""
        players[0].send({"do": "keep", "path": str(self._path)})
        players[0].answer()
        self.messages = read_messages(self._path)
        process = _Process(
            self._stack, self._host, "benchmarks.bare", self._host.address, str(self._workers), str(self._path)
        )
        self.pid = process.pid
        _together(players, {"do": "bare", "address": process.line()})


def _with_parent() -> tuple[str, ...]:
    """What lets a child end with this process even where that is killed."""
    return ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()


def _start_aggregator(
    stack: contextlib.ExitStack, host: links.Host, folder: Path, workers: int
) -> tuple[_Process, str, str]:
    """(the process, where workers connect, where /metrics is)."""
    config = folder / "run.toml"
    config.write_text(CONFIG.format(workers=workers, samples=16 * workers))
    anywhere = f"{host.address}:0"
    process = _Process(stack, host, "gradwire", "aggregator", str(config), "--listen", anywhere, "--http", anywhere)
    address = http = ""
    while not (address and http):
        line = process.line()
        if " listening on " in line:
            address = line.rpartition(" ")[2]
        elif line.startswith("metrics: "):
            http = line.split("/")[2]
    return process, address, http


def _join(players: list[_Player], round_: prepare.Contributions, folder: Path, address: str) -> None:
    join, snapshot = folder / "join", folder / "snapshot"
    write_messages(join, prepare.join_messages(round_.manifest))
    write_messages(snapshot, prepare.snapshot_messages())
    names: list[dict[str, str]] = [{} for _ in players]
    for number, messages in enumerate(round_.messages):
        # Names in the order of the contributions, so that the average's order is that of `prepare.aggregate`.
        path = folder / f"worker-{number}"
        write_messages(path, messages)
        names[number * len(players) // len(round_.messages)][path.name] = str(path)
    for player, workers in zip(players, names, strict=True):
        command = {"do": "join", "aggregator": address, "workers": workers}
        player.send({**command, "join": str(join), "snapshot": str(snapshot)})
        player.answer()


def _together(players: list[_Player], command: dict[str, Any]) -> list[Any]:
    for player in players:
        player.send(command)
    return [player.answer() for player in players]


def _round(players: list[_Player], kind: str, number: int) -> tuple[Timing, set[str]]:
    at = time.monotonic() + HEAD_START_S
    answers = _together(players, {"do": kind, "round": number, "at": at})
    marks = [each for answer in answers for each in answer["marks"]]
    start = min(each["start"] for each in marks)
    answered = max(each["answered"] for each in marks)
    first, last = min(each["first"] for each in marks), max(each["last"] for each in marks)
    digests = {digest for answer in answers for digest in answer["digests"]}
    return Timing(last - start, answered - start, max(0.0, first - answered), last - max(first, answered)), digests


def _check(digests: set[str], expected: prepare.Aggregate) -> None:
    if digests != {expected.digest}:
        raise RuntimeError("what workers collected is not the average of what was contributed")


def _figures(timing: Timing) -> tuple[float, float, float, float]:
    return timing.total, timing.upload, timing.between, timing.download
