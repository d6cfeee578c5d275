"""What is worth remembering of a run: per worker, per round, and in words."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Final

HISTORY: Final = 1000
EVENTS: Final = 50


@dataclass
class WorkerRecord:
    """Sums over a worker's life in the run."""

    upload_bytes: int = 0
    download_bytes: int = 0
    accepted: int = 0
    refused: int = 0
    last_refusal: str = ""
    loss: float | None = None
    samples: int = 0


@dataclass
class RoundRecord:
    """A round that is over; see the message of the same name."""

    round: int
    seconds: float
    contributors: int
    samples: int
    upload_bytes: int
    download_bytes: int
    loss: float | None = None
    held_out_loss: float | None = None


@dataclass
class Record:
    """The run's memory for those who look at it."""

    workers: dict[str, WorkerRecord] = field(default_factory=lambda: defaultdict(WorkerRecord))
    rounds: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=HISTORY))
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))
    upload_bytes: int = 0
    checkpoint: str = ""
    final_held_out_loss: float | None = None

    def event(self, text: str) -> None:
        """Remembers something in words, with the wall clock's time."""
        self.events.append((time.time(), text))

    def refused(self, worker: str, reason: str) -> None:
        """A contribution of a worker did not count."""
        self.workers[worker].refused += 1
        self.workers[worker].last_refusal = reason
