"""How long a session tries, and how long it waits between tries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

# An aggregator that is away may come back: time alone bounds the tries. What else can be retried is likely to fail the
# same way again, so it is tried a few times only.
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with full jitter.

    give_up_after_s: total time without a single success.
    attempts: consecutive failures of a kind that says the aggregator is there, such as INTERNAL.
    """

    give_up_after_s: float = 600.0
    attempts: int = 6
    first_s: float = 0.1
    longest_s: float = 5.0

    def delays(self) -> Iterator[float]:
        """How long to wait before each further try; seconds, without end."""
        limit = self.first_s
        while True:
            yield random.uniform(limit / 2, limit)
            limit = min(limit * 2, self.longest_s)

    def exhausted(self, code: grpc.StatusCode, *, elapsed_s: float, failures: int) -> bool:
        """Whether a call that has now failed with `code` is not to be tried again."""
        return elapsed_s >= self.give_up_after_s or (code not in _AWAY and failures >= self.attempts)
