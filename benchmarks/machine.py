"""What processes cost and what else the machine was busy with, as Linux's /proc tells it; nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Memory:
    """Resident memory in bytes: now, and at most since the start or the last `forget_peak`."""

    resident: int
    peak: int


def memory(pid: int) -> Memory | None:
    """Of one process; None where it can't be told."""
    with contextlib.suppress(OSError, KeyError):
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        kilobytes = [int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM")]
        return Memory(kilobytes[0] * 1024, kilobytes[1] * 1024)
    return None


def forget_peak(pid: int) -> None:
    """Starts the peak of a process's memory anew."""
    with contextlib.suppress(OSError):
        (_PROC / str(pid) / "clear_refs").write_text("5")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used; 0 where it can't be told."""
    with contextlib.suppress(OSError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


def children() -> list[int]:
    """The processes that this thread started and that still run."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in (_PROC / f"self/task/{os.getpid()}/children").read_text().split()]
    return []


class OtherLoad:
    """How many cores programs other than ours keep busy, from here to `cores`."""

    def __init__(self, ours: Iterable[int]) -> None:
        self._ours = [os.getpid(), *ours]
        self._start, self._before = time.monotonic(), self._others()

    def cores(self) -> float | None:
        """The mean number of cores; None where it can't be told."""
        seconds, others = time.monotonic() - self._start, self._others()
        if others is None or self._before is None or seconds <= 0:
            return None
        return max(0.0, (others - self._before) / seconds)

    def _others(self) -> float | None:
        with contextlib.suppress(OSError):
            user, nice, system, _, _, irq, softirq, steal, *_ = map(
                int, (_PROC / "stat").read_text().splitlines()[0].split()[1:]
            )
            busy = (user + nice + system + irq + softirq + steal) / _TICKS
            return busy - sum(cpu_seconds(pid) for pid in self._ours)
        return None


def description() -> str:
    """Cores, architecture and system, in a few words."""
    uname = os.uname() if hasattr(os, "uname") else None
    system = f"{uname.machine}, {uname.sysname}" if uname else os.name
    return f"{os.cpu_count()} cores, {system}"
