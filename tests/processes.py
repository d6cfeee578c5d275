"""gradwire commands as processes of their own, ended with the test whatever happens."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

TIMEOUT_S = 60.0
GRACE_S = 10.0

TINY = """\
name = "tiny"
rounds = {rounds}
[batch]
global_batch = 16
inner_batch = 4
shares = "fixed"
[round]
min_workers = {min_workers}
deadline_s = {deadline_s}
gather_s = 2.0
lease_s = {lease_s}
heartbeat_s = {heartbeat_s}
[server]
listen = "127.0.0.1:{port}"
http = "127.0.0.1:0"
[training]
method = "{method}"
evaluate_every = 1000
[training.optimizer]
warmup_rounds = 0.5
[training.model]
dim = {dim}
layers = 1
heads = 2
context = 16
[training.data]
path = "{text}"
[training.compression]
values = "{values}"
"""


def tiny_config(
    folder: Path,
    *,
    rounds: int = 1000,
    min_workers: int = 1,
    deadline_s: float = 60.0,
    lease_s: float = 3.0,
    port: int = 0,
    dim: int = 16,
    method: str = "sparseloco",
    values: str = "bf16",
) -> Path:
    """The config file of a run on a small text that trains many rounds a second."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    path = folder / "run.toml"
    path.write_text(
        TINY.format(
            rounds=rounds,
            min_workers=min_workers,
            deadline_s=deadline_s,
            lease_s=lease_s,
            heartbeat_s=lease_s / 5,
            port=port,
            dim=dim,
            method=method,
            values=values,
            text=text,
        )
    )
    return path


class Process:
    """A command whose output is read as it comes."""

    def __init__(self, *command: str) -> None:
        self.output: list[str] = []
        self._drained = threading.Event()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def text(self) -> str:
        return "\n".join(self.output)

    def wait_for(self, words: str) -> str:
        """Waits for a line that holds `words`, and returns it."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no line with {words!r} within {TIMEOUT_S:.0f} s:\n{self.text}") from None
            if line is None:
                raise EOFError(f"it ended without a line with {words!r}:\n{self.text}")
            if words in line:
                return line

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Waits for the end; the exit code."""
        code = self._child.wait(timeout_s)
        self._drained.wait(5)
        return code

    def end(self) -> None:
        """Kills it and whatever it left in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _read(self) -> None:
        for line in self._child.stdout or ():
            self.output.append(line.rstrip())
            self._lines.put(line)
        self._lines.put(None)
        self._drained.set()


@contextlib.contextmanager
def process(*command: str) -> Iterator[Process]:
    """A python command, killed at the end if it still runs."""
    child = Process(*command)
    try:
        yield child
    finally:
        child.end()


@contextlib.contextmanager
def aggregator(config: Path, *arguments: str) -> Iterator[tuple[Process, str]]:
    """`gradwire aggregator`, and its address."""
    with process("-m", "gradwire", "aggregator", str(config), *arguments) as child:
        address = child.wait_for("listening on").rpartition(" ")[2].strip()
        yield child, address


def worker(address: str, name: str, *arguments: str) -> contextlib.AbstractContextManager[Process]:
    """`gradwire worker`."""
    return process("-m", "gradwire", "worker", address, "--name", name, "--device", "cpu", *arguments)
