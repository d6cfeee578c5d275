"""Who trains which samples. Pure.

Sample numbers are handed out once each, from 0 up. What was handed out and didn't count comes back to the pool and
goes out first; after a number of attempts it is recorded as skipped. At any time counted, skipped, pool and what is
out are disjoint and together are [0, high_water).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

Range = tuple[int, int]  # half-open


@dataclass(frozen=True)
class Returned:
    """Samples in the pool: how often they went out in vain, and why they came back last."""

    start: int
    stop: int
    attempts: int
    reason: str


@dataclass
class RangeSet:
    """Disjoint half-open ranges, ascending, merged where they touch."""

    ranges: list[Range] = field(default_factory=list)

    def add(self, start: int, stop: int) -> None:
        """Adds a range. Raises ValueError if a part of it is in already."""
        at = bisect.bisect_left(self.ranges, (start, stop))
        if (at and self.ranges[at - 1][1] > start) or (at < len(self.ranges) and self.ranges[at][0] < stop):
            raise ValueError(f"[{start}, {stop}) counts twice")
        if at < len(self.ranges) and self.ranges[at][0] == stop:
            stop = self.ranges.pop(at)[1]
        if at and self.ranges[at - 1][1] == start:
            at -= 1
            start = self.ranges.pop(at)[0]
        self.ranges.insert(at, (start, stop))

    @property
    def total(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class Plan:
    """Hands out samples in pieces that are multiples of `inner_batch`."""

    def __init__(self, *, inner_batch: int, attempts: int) -> None:
        self._inner_batch = inner_batch
        self._attempts = attempts
        self.high_water = 0
        self.pool: list[Returned] = []
        self.counted = RangeSet()
        self.skipped: list[Returned] = []
        self._out: dict[int, list[Returned]] = {}

    def take(self, assignment: int, samples: int, *, fresh: bool = True) -> tuple[Range, ...]:
        """Hands out `samples` samples under an assignment: from the pool first, then (if `fresh`) new ones."""
        taken: list[Returned] = []
        while samples > 0 and self.pool:
            piece = self.pool.pop(0)
            if piece.stop - piece.start > samples:
                cut = piece.start + samples
                self.pool.insert(0, Returned(cut, piece.stop, piece.attempts, piece.reason))
                piece = Returned(piece.start, cut, piece.attempts, piece.reason)
            taken.append(piece)
            samples -= piece.stop - piece.start
        if samples > 0 and fresh:
            taken.append(Returned(self.high_water, self.high_water + samples, 0, ""))
            self.high_water += samples
        if taken:
            self._out[assignment] = taken
        return tuple((piece.start, piece.stop) for piece in taken)

    def count(self, assignment: int) -> int:
        """The samples of an assignment counted. Returns how many."""
        pieces = self._out.pop(assignment)
        for piece in pieces:
            self.counted.add(piece.start, piece.stop)
        return sum(piece.stop - piece.start for piece in pieces)

    def give_back(self, assignment: int, reason: str) -> int:
        """The samples of an assignment did not count. Returns how many are back in the pool."""
        back = 0
        for piece in self._out.pop(assignment):
            again = Returned(piece.start, piece.stop, piece.attempts + 1, reason)
            if again.attempts >= self._attempts:
                self.skipped.append(again)
            else:
                self.pool.append(again)
                back += again.stop - again.start
        self.pool.sort(key=lambda piece: piece.start)
        return back

    @property
    def samples_skipped(self) -> int:
        """Samples that were given up."""
        return sum(piece.stop - piece.start for piece in self.skipped)

    def split(self, samples: int, speeds: Mapping[str, float | None]) -> dict[str, int]:
        """Cuts a number of samples among workers in proportion to their speeds (samples per second).

        A worker of unknown speed counts as an average one. Every share is a multiple of the inner batch, and may be
        0; they add up to `samples`. What doesn't divide goes to the largest remainders, on a tie to the first name.
        """
        # In fractions, so that no rounding decides who gets what.
        known = [Fraction(speed) for speed in speeds.values() if speed is not None]
        average = sum(known, Fraction()) / len(known) if known else Fraction(1)
        weights = {name: average if speed is None else Fraction(speed) for name, speed in sorted(speeds.items())}
        total = sum(weights.values(), Fraction())
        if total <= 0:
            weights, total = dict.fromkeys(weights, Fraction(1)), Fraction(len(weights))
        units = samples // self._inner_batch
        exact = {name: units * weight / total for name, weight in weights.items()}
        shares = {name: math.floor(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: (shares[name] - exact[name], name))
        for name in by_remainder[: units - sum(shares.values())]:
            shares[name] += 1
        return {name: share * self._inner_batch for name, share in shares.items()}
