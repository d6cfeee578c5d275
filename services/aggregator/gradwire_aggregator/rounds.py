"""The state machine of a round. Pure: the time is passed in, in seconds of any monotonic clock.

    waiting --min_workers ready--> open: shares handed out
    open --every assignment settled, at least min_workers answered--> averaging
    open --deadline, at least min_workers answered--> averaging (the rest are late)
    open --deadline, too few answered--> open; the shares of the late go to those who wait for work
    averaging --finish--> the next round waits, or the run has ended

`decide` returns the phase and its reason in words; the reason is what logs, `gradwire status` and the page show.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from gradwire_aggregator.plan import Plan, Range

Speeds: TypeAlias = Mapping[str, float | None]


class Phase(enum.Enum):
    """Where a round stands."""

    WAITING = "waiting"
    OPEN = "open"
    AVERAGING = "averaging"
    ENDED = "ended"


class Outcome(enum.Enum):
    """What became of an assignment. All but PENDING are settled; REVOKED alone is not an answer."""

    PENDING = "pending"
    COMMITTED = "committed"
    REJECTED = "rejected"
    ABSTAINED = "abstained"
    REVOKED = "revoked"


ANSWERS: Final = frozenset({Outcome.COMMITTED, Outcome.REJECTED, Outcome.ABSTAINED})


class Verdict(enum.Enum):
    """What a worker is told about its contribution."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    LATE = "late"
    REJECTED = "rejected"


@dataclass
class Assignment:
    """One worker's share of one round."""

    id: int
    worker: str
    ranges: tuple[Range, ...]
    due_s: float = math.inf
    outcome: Outcome = Outcome.PENDING
    crc32: int = 0
    reason: str = ""

    @property
    def samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Policy:
    """When a round opens and closes. Times in seconds; see RoundConfig and BatchConfig."""

    rounds: int
    global_batch: int
    min_workers: int
    deadline_s: float
    gather_s: float
    by_speed: bool = True


@dataclass(frozen=True)
class Decision:
    """The phase, why, and when time alone may change it."""

    phase: Phase
    reason: str
    wake_s: float | None = None


@dataclass
class Rounds:
    """All rounds of a run, of which one is current."""

    policy: Policy
    plan: Plan
    number: int = 0
    phase: Phase = Phase.WAITING
    ready: set[str] = field(default_factory=set)
    assignments: dict[int, Assignment] = field(default_factory=dict)
    opened_s: float = 0.0
    closed_s: float = 0.0
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _regulars: set[str] = field(default_factory=set)
    _expected: set[str] = field(default_factory=set)
    _enough_since_s: float | None = None
    _quorum: int = 0
    _returned: int = 0

    def go_on(self, number: int, *, life: int, expected: Iterable[str]) -> None:
        """Continues a run that was stopped before round `number`, of whatever died with the process nothing is left.

        life: how often the run was started; no assignment's number comes twice. expected: who is waited for.
        """
        self.number = number
        self.phase = Phase.ENDED if number >= self.policy.rounds else Phase.WAITING
        self._ids = itertools.count((life << 32) + 1)
        self._expected = set(expected)

    # What happens.

    def is_ready(self, worker: str) -> None:
        """A worker has the weights of the current round and asks for work."""
        self.ready.add(worker)

    def is_gone(self, worker: str, reason: str) -> None:
        """A worker's session ended: what it has not committed is revoked."""
        self.ready.discard(worker)
        self._regulars.discard(worker)
        self._expected.discard(worker)
        for assignment in self.assignments.values():
            if assignment.worker == worker and assignment.outcome is Outcome.PENDING:
                self._settle(assignment, Outcome.REVOKED, reason)

    def commit(self, worker: str, round_: int, assignment_id: int, crc32: int) -> tuple[Verdict, str]:
        """A contribution arrived whole."""
        verdict, reason = self.standing(worker, round_, assignment_id, crc32)
        if verdict is Verdict.ACCEPTED:
            assignment = self.assignments[assignment_id]
            assignment.crc32 = crc32
            self._settle(assignment, Outcome.COMMITTED, "")
        return verdict, reason

    def refuse(self, worker: str, round_: int, assignment_id: int, outcome: Outcome, reason: str) -> None:
        """A contribution was rejected for its content, or its worker abstained."""
        if self.standing(worker, round_, assignment_id)[0] is Verdict.ACCEPTED:
            self._settle(self.assignments[assignment_id], outcome, reason)

    def standing(self, worker: str, round_: int, assignment_id: int, crc32: int | None = None) -> tuple[Verdict, str]:
        """What a contribution would be told if it were committed now."""
        if round_ != self.number:
            tense = "is over" if round_ < self.number else "is still to come"
            return Verdict.LATE, f"round {round_} {tense}; the current one is {self.number}"
        assignment = self.assignments.get(assignment_id)
        if assignment is None or assignment.worker != worker:
            return Verdict.LATE, f"assignment {assignment_id} of round {round_} is not {worker}'s"
        if assignment.outcome is Outcome.COMMITTED:
            if crc32 is None or crc32 == assignment.crc32:
                return Verdict.DUPLICATE, "it was accepted before"
            return Verdict.REJECTED, "another content was accepted for this assignment before"
        if assignment.outcome is not Outcome.PENDING:
            return Verdict.LATE, f"assignment {assignment_id} was {assignment.outcome.value}: {assignment.reason}"
        if self.phase is not Phase.OPEN:
            return Verdict.LATE, f"round {round_} has closed"
        return Verdict.ACCEPTED, ""

    def pending(self, worker: str) -> Assignment | None:
        """What a worker has to train in the current round."""
        mine = (a for a in self.assignments.values() if a.worker == worker and a.outcome is Outcome.PENDING)
        return next(mine, None)

    def answered(self, worker: str) -> bool:
        """Whether a worker has answered in the current round, and so has nothing to do but to collect it."""
        return worker not in self.ready and any(
            a.worker == worker and a.outcome in ANSWERS for a in self.assignments.values()
        )

    def lacks(self, worker: str) -> bool:
        """Whether a worker has to answer before it can wait for the current round's end."""
        return self.phase in (Phase.WAITING, Phase.OPEN) and not self.answered(worker)

    # What follows from it.

    def decide(self, now: float, speeds: Speeds) -> Decision:
        """Makes the transitions that are due. `speeds`: the present workers, in samples per second where known."""
        if self.phase is Phase.WAITING:
            self.ready &= speeds.keys()
            enough = len(self.ready) >= self.policy.min_workers
            if not enough:
                self._enough_since_s = None
            elif self._enough_since_s is None:
                self._enough_since_s = now
            if enough and (not self._missing(speeds) or now >= self._gathered_s()):
                self._open(now, speeds)
        if self.phase is Phase.OPEN:
            if not self._may_close(now):
                self._take_from_the_overdue(now, speeds)
                self._hand_out_returned(now, speeds)
            if self._may_close(now):
                self._close(now)
        return self.explain(now, speeds)

    def explain(self, now: float, speeds: Speeds) -> Decision:
        """Where the round stands and why, changing nothing."""
        match self.phase:
            case Phase.WAITING:
                return self._explain_waiting(now, speeds)
            case Phase.OPEN:
                return self._explain_open(now)
            case Phase.AVERAGING:
                return Decision(self.phase, f"averaging {_count(len(self.contributions), 'contribution')}")
            case Phase.ENDED:
                return Decision(self.phase, f"all {self.policy.rounds} rounds are done")

    @property
    def contributions(self) -> list[Assignment]:
        """What counts in the current round, by worker."""
        committed = [a for a in self.assignments.values() if a.outcome is Outcome.COMMITTED]
        return sorted(committed, key=lambda a: (a.worker, a.id))

    def outcome(self, *, counted: bool = True) -> tuple[Plan, int]:
        """(the plan once the round is over, the samples that count), changing nothing: for the ledger, before `finish`.

        counted: False if nothing usable came of it; then the round is void.
        """
        plan, samples = copy.deepcopy(self.plan), 0
        for assignment in self.contributions:
            if counted:
                samples += plan.count(assignment.id)
            else:
                plan.give_back(assignment.id, "the average was not finite")
        return plan, samples

    def finish(self, *, counted: bool = True) -> int:
        """The aggregate is there: its samples count, and the next round waits. Returns how many count."""
        self.plan, samples = self.outcome(counted=counted)
        self.number += 1
        self.phase = Phase.ENDED if self.number >= self.policy.rounds else Phase.WAITING
        self.assignments = {}
        self._regulars |= self.ready  # who waited without a share is waited for, too
        self.ready = set()
        self._enough_since_s = None
        return samples

    def _missing(self, speeds: Speeds) -> list[str]:
        """Who was in the last round and is not ready yet; after a restart also those that have not come back."""
        return sorted(((self._regulars & speeds.keys()) | self._expected) - self.ready)

    def _gathered_s(self) -> float:
        since = self._enough_since_s
        return math.inf if since is None else since + self.policy.gather_s

    def _explain_waiting(self, now: float, speeds: Speeds) -> Decision:
        needed, missing = self.policy.min_workers, self._missing(speeds)
        if len(self.ready) < needed or self._enough_since_s is None or not missing:
            return Decision(self.phase, f"waiting: {len(self.ready)} of {_count(needed, 'worker')} ready")
        until = self._gathered_s()
        who = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        return Decision(self.phase, f"waiting up to {max(0.0, until - now):.1f} s more for {who}", until)

    def _open(self, now: float, speeds: Speeds) -> None:
        self.phase, self.opened_s, self._returned = Phase.OPEN, now, 0
        self._regulars, self._expected = set(self.ready), set()
        chosen = {name: speeds[name] if self.policy.by_speed else None for name in self.ready}
        self._hand_out(self.plan.split(self.policy.global_batch, chosen), now, fresh=True)
        self._quorum = min(self.policy.min_workers, len(self.assignments))

    def _hand_out(self, shares: Mapping[str, int], now: float, *, fresh: bool) -> None:
        for worker, samples in sorted(shares.items()):
            if not samples:
                continue
            number = next(self._ids)
            ranges = self.plan.take(number, samples, fresh=fresh)
            if ranges:
                self.assignments[number] = Assignment(number, worker, ranges, now + self.policy.deadline_s)
                self.ready.discard(worker)

    def _answers(self) -> int:
        return len({a.worker for a in self.assignments.values() if a.outcome in ANSWERS})

    def _open_ones(self) -> list[Assignment]:
        return [a for a in self.assignments.values() if a.outcome is Outcome.PENDING]

    def _may_close(self, now: float) -> bool:
        open_ones = self._open_ones()
        if not open_ones and not self._returned:
            return True  # whoever is asked has answered, and there is no share left to ask another with
        return self._answers() >= self._quorum and (now >= self._deadline_s() or not open_ones)

    def _deadline_s(self) -> float:
        return self.opened_s + self.policy.deadline_s

    def _explain_open(self, now: float) -> Decision:
        asked, deadline = len({a.worker for a in self.assignments.values()}), self._deadline_s()
        progress = f"open: {self._answers()} of {_count(asked, 'worker')} answered"
        if now < deadline:
            return Decision(self.phase, f"{progress}, {deadline - now:.1f} s to the deadline", deadline)
        reason = f"{progress}, {self._quorum} needed; the deadline passed {now - deadline:.0f} s ago"
        later = [a.due_s for a in self._open_ones() if a.due_s > now]
        return Decision(self.phase, reason, min(later, default=None))

    def _take_from_the_overdue(self, now: float, speeds: Speeds) -> None:
        """Past the deadline, and too few have answered: if others wait for work, the shares of the slow go to them."""
        if now >= self._deadline_s() and self.ready & speeds.keys():
            for assignment in self._open_ones():
                if now >= assignment.due_s:
                    self._settle(assignment, Outcome.REVOKED, self._late())

    def _hand_out_returned(self, now: float, speeds: Speeds) -> None:
        waiting = {name: speeds[name] for name in self.ready if name in speeds}
        if self._returned and waiting:
            shares = self.plan.split(self._returned, waiting)
            self._returned = 0
            self._regulars |= waiting.keys()
            self._hand_out(shares, now, fresh=False)

    def _close(self, now: float) -> None:
        for assignment in self._open_ones():
            self._settle(assignment, Outcome.REVOKED, self._late())
        self.phase, self.closed_s = Phase.AVERAGING, now

    def _late(self) -> str:
        return f"late: nothing came within {self.policy.deadline_s:g} s"

    def _settle(self, assignment: Assignment, outcome: Outcome, reason: str) -> None:
        assignment.outcome, assignment.reason = outcome, reason
        if outcome is not Outcome.COMMITTED:
            self._returned += self.plan.give_back(assignment.id, f"{assignment.worker}: {reason or outcome.value}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
