"""Every arrow of the round's diagram (DESIGN, section 5), with times given."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradwire_aggregator.plan import Plan
from gradwire_aggregator.rounds import Outcome, Phase, Policy, Rounds, Verdict


class Play:
    """Rounds of eight samples, with workers that come and go and a clock that is set by hand."""

    def __init__(self, *names, min_workers=1, rounds=10, global_batch=8, attempts=3, by_speed=False):
        policy = Policy(
            rounds=rounds,
            global_batch=global_batch,
            min_workers=min_workers,
            deadline_s=10.0,
            gather_s=3.0,
            by_speed=by_speed,
        )
        self.rounds = Rounds(policy, Plan(inner_batch=1, attempts=attempts))
        self.speeds = dict.fromkeys(names)

    def ready(self, *names):
        for name in names:
            self.speeds.setdefault(name)
            self.rounds.is_ready(name)

    def gone(self, name, reason="left"):
        self.speeds.pop(name, None)
        self.rounds.is_gone(name, reason)

    def decide(self, now):
        return self.rounds.decide(now, self.speeds)

    def id_of(self, name):
        return self.rounds.pending(name).id

    def ranges_of(self, name):
        pending = self.rounds.pending(name)
        return pending.ranges if pending else None

    def commit(self, name, crc32=7, *, assignment=None, round_=None):
        assignment = self.id_of(name) if assignment is None else assignment
        return self.rounds.commit(name, self.rounds.number if round_ is None else round_, assignment, crc32)

    def refuse(self, name, outcome=Outcome.REJECTED, reason="NaN"):
        self.rounds.refuse(name, self.rounds.number, self.id_of(name), outcome, reason)

    def contributors(self):
        return [each.worker for each in self.rounds.contributions]

    def full_round(self, *names, now):
        """All of these train a round and it is finished."""
        self.ready(*names)
        self.decide(now)
        for name in names:
            self.commit(name)
        assert self.decide(now).phase is Phase.AVERAGING
        self.rounds.finish()


@pytest.fixture
def opened():
    """Round 0, open since 100.0 with ann, bob and cid; two have to answer by 110.0."""
    play = Play(min_workers=2, global_batch=9)
    play.ready("ann", "bob", "cid")
    assert play.decide(100.0).phase is Phase.OPEN
    return play


# waiting -> open


def test_a_round_waits_for_enough_workers():
    play = Play(min_workers=2)
    play.ready("ann")
    decision = play.decide(0.0)
    assert (decision.phase, decision.wake_s) == (Phase.WAITING, None)
    assert decision.reason == "waiting: 1 of 2 workers ready"
    assert play.decide(1e6).phase is Phase.WAITING
    play.ready("bob")
    assert play.decide(1e6).phase is Phase.OPEN


def test_one_worker_is_a_legal_run():
    play = Play()
    assert play.decide(0.0).reason == "waiting: 0 of 1 worker ready"
    play.ready("ann")
    assert play.decide(0.0).phase is Phase.OPEN
    assert play.ranges_of("ann") == ((0, 8),)


def test_the_first_round_does_not_wait_for_who_joined_but_is_not_ready():
    play = Play("ann", "bob", min_workers=1)
    play.ready("ann")
    assert play.decide(0.0).phase is Phase.OPEN
    assert play.ranges_of("bob") is None


def test_who_came_while_a_round_was_open_is_waited_for_in_the_next():
    # Or it would be late for ever: the others are ready again before it has even collected.
    play = Play(min_workers=1)
    play.ready("ann")
    play.decide(0.0)
    play.ready("bob")
    play.commit("ann")
    play.decide(1.0)
    play.rounds.finish()
    play.ready("ann")
    assert play.decide(2.0).reason == "waiting up to 3.0 s more for bob"
    play.ready("bob")
    assert play.decide(2.5).phase is Phase.OPEN
    assert play.ranges_of("bob") is not None


def test_a_worker_that_is_gone_is_not_counted_as_ready():
    play = Play(min_workers=2)
    play.ready("ann", "bob")
    play.gone("bob")
    assert play.decide(0.0).reason == "waiting: 1 of 2 workers ready"


def test_a_worker_whose_lease_ended_is_not_counted_as_ready():
    play = Play(min_workers=2)
    play.ready("ann", "bob")
    del play.speeds["bob"]  # the roster no longer has it
    assert play.decide(0.0).phase is Phase.WAITING


def test_an_open_round_hands_out_the_whole_batch_once():
    play = Play(min_workers=2)
    play.ready("ann", "bob")
    play.decide(0.0)
    assert (play.ranges_of("ann"), play.ranges_of("bob")) == (((0, 4),), ((4, 8),))
    assert play.id_of("ann") != play.id_of("bob")


def test_shares_go_by_speed():
    play = Play(min_workers=2, by_speed=True)
    play.speeds = {"ann": 1.0, "bob": 3.0}
    play.ready("ann", "bob")
    play.decide(0.0)
    assert (play.ranges_of("ann"), play.ranges_of("bob")) == (((0, 2),), ((2, 8),))


def test_fixed_shares_do_not_go_by_speed():
    play = Play(min_workers=2, by_speed=False)
    play.speeds = {"ann": 1.0, "bob": 3.0}
    play.ready("ann", "bob")
    play.decide(0.0)
    assert (play.ranges_of("ann"), play.ranges_of("bob")) == (((0, 4),), ((4, 8),))


# gathering


def test_the_ready_wait_for_those_of_the_last_round():
    play = Play()
    play.full_round("ann", now=0.0)
    play.ready("bob")  # it joined meanwhile and is faster
    decision = play.decide(20.0)
    assert (decision.phase, decision.wake_s) == (Phase.WAITING, 23.0)
    assert decision.reason == "waiting up to 3.0 s more for ann"
    assert play.decide(22.5).reason == "waiting up to 0.5 s more for ann"
    play.ready("ann")
    assert play.decide(22.5).phase is Phase.OPEN
    assert play.ranges_of("ann")
    assert play.ranges_of("bob")


def test_the_ready_wait_no_longer_than_gather_s():
    play = Play()
    play.full_round("ann", "bob", now=0.0)
    play.ready("bob")
    assert play.decide(20.0).phase is Phase.WAITING
    assert play.decide(22.999).phase is Phase.WAITING
    assert play.decide(23.0).phase is Phase.OPEN
    assert (play.ranges_of("ann"), play.ranges_of("bob")) == (None, ((8, 16),))


def test_the_ready_do_not_wait_for_one_that_is_gone():
    play = Play()
    play.full_round("ann", "bob", now=0.0)
    play.ready("bob")
    assert play.decide(20.0).phase is Phase.WAITING
    play.gone("ann")
    assert play.decide(20.5).phase is Phase.OPEN


def test_the_time_to_gather_starts_when_enough_are_ready():
    play = Play(min_workers=2)
    play.full_round("ann", "bob", "cid", now=0.0)
    play.ready("ann")
    assert play.decide(20.0).wake_s is None
    play.ready("bob")
    assert play.decide(50.0).wake_s == 53.0
    play.gone("bob")
    assert play.decide(51.0).reason == "waiting: 1 of 2 workers ready"
    play.ready("bob")
    assert play.decide(60.0).wake_s == 63.0


def test_those_waited_for_are_named_but_not_all_of_many():
    play = Play(global_batch=9)
    play.full_round("ann", "bob", "cid", "dan", "eve", now=0.0)
    play.ready("eve")
    assert play.decide(20.0).reason == "waiting up to 3.0 s more for ann, bob, cid and others"


def test_one_that_missed_a_round_is_not_waited_for_in_the_next():
    play = Play()
    play.full_round("ann", "bob", now=0.0)
    play.ready("bob")
    play.decide(20.0)
    play.decide(23.0)
    play.commit("bob")
    play.decide(24.0)
    play.rounds.finish()
    play.ready("bob")
    assert play.decide(30.0).phase is Phase.OPEN


# open -> averaging


def test_a_round_closes_when_all_have_answered(opened):
    opened.commit("ann")
    opened.commit("bob")
    decision = opened.decide(104.0)
    assert (decision.phase, decision.wake_s) == (Phase.OPEN, 110.0)
    assert decision.reason == "open: 2 of 3 workers answered, 6.0 s to the deadline"
    opened.commit("cid")
    decision = opened.decide(104.0)
    assert (decision.phase, decision.reason) == (Phase.AVERAGING, "averaging 3 contributions")


def test_the_deadline_closes_a_round_and_the_rest_are_late(opened):
    opened.commit("ann")
    opened.commit("bob")
    late = opened.id_of("cid")
    assert opened.decide(109.999).phase is Phase.OPEN
    assert opened.decide(110.0).phase is Phase.AVERAGING
    assert opened.contributors() == ["ann", "bob"]
    verdict, reason = opened.commit("cid", assignment=late)
    assert (verdict, reason) == (
        Verdict.LATE,
        f"assignment {late} was revoked: late: nothing came within 10 s",
    )
    assert opened.rounds.finish() == 6
    assert opened.rounds.plan.counted.ranges == [(0, 6)]
    assert [(piece.start, piece.stop, piece.reason) for piece in opened.rounds.plan.pool] == [
        (6, 9, "cid: late: nothing came within 10 s")
    ]


def test_a_round_without_quorum_stays_open_past_its_deadline_and_says_so(opened):
    opened.commit("ann")
    decision = opened.decide(115.0)
    assert (decision.phase, decision.wake_s) == (Phase.OPEN, None)
    assert decision.reason == "open: 1 of 3 workers answered, 2 needed; the deadline passed 5 s ago"
    assert opened.commit("bob") == (Verdict.ACCEPTED, "")
    assert opened.decide(116.0).phase is Phase.AVERAGING
    assert opened.contributors() == ["ann", "bob"]


def test_the_next_round_gets_what_was_late_first(opened):
    opened.commit("ann")
    opened.commit("bob")
    opened.decide(110.0)
    opened.rounds.finish()
    opened.ready("ann", "bob", "cid")
    opened.decide(120.0)
    assert [opened.ranges_of(name) for name in ("ann", "bob", "cid")] == [((6, 9),), ((9, 12),), ((12, 15),)]


def test_a_share_that_comes_back_at_the_deadline_is_not_handed_out_just_to_be_revoked(opened):
    # dan has waited all the while. The round is over before he could train anything: nobody may call him late.
    opened.commit("ann")
    opened.commit("bob")
    opened.ready("dan")
    opened.gone("cid")
    assert opened.decide(110.0).phase is Phase.AVERAGING
    assert [each.worker for each in opened.rounds.assignments.values()] == ["ann", "bob", "cid"]
    assert [piece.attempts for piece in opened.rounds.plan.pool] == [1]


# shares that come back


def test_a_revoked_share_goes_to_one_that_waits_in_the_same_round(opened):
    opened.ready("dan")
    assert opened.ranges_of("dan") is None
    opened.gone("bob", "not heard of for 15 s")
    opened.decide(103.0)
    assert opened.ranges_of("dan") == ((3, 6),)
    assert opened.commit("dan") == (Verdict.ACCEPTED, "")
    opened.commit("ann")
    opened.commit("cid")
    assert opened.decide(104.0).phase is Phase.AVERAGING
    assert opened.contributors() == ["ann", "cid", "dan"]
    assert opened.rounds.finish() == 9
    assert opened.rounds.plan.counted.ranges == [(0, 9)]


def test_a_revoked_share_waits_for_one_that_comes_later(opened):
    opened.gone("bob")
    opened.commit("ann")
    opened.decide(103.0)
    opened.ready("dan")
    opened.decide(104.0)
    assert opened.ranges_of("dan") == ((3, 6),)


def test_a_revoked_share_is_split_among_all_that_wait(opened):
    opened.ready("dan", "eve")
    opened.gone("bob")
    opened.decide(103.0)
    assert (opened.ranges_of("dan"), opened.ranges_of("eve")) == (((3, 5),), ((5, 6),))


def test_a_returned_share_is_nothing_to_wait_for_when_enough_have_answered(opened):
    opened.gone("cid")
    opened.commit("ann")
    opened.commit("bob")
    assert opened.decide(103.0).phase is Phase.AVERAGING
    opened.rounds.finish()
    assert [(piece.start, piece.stop) for piece in opened.rounds.plan.pool] == [(6, 9)]


def test_a_restarted_worker_gets_its_own_share_back(opened):
    old = opened.id_of("bob")
    opened.rounds.is_gone("bob", "its worker was started anew")
    opened.decide(102.0)
    opened.ready("bob")
    opened.decide(103.0)
    assert opened.ranges_of("bob") == ((3, 6),)
    assert opened.id_of("bob") != old
    verdict, reason = opened.commit("bob", assignment=old)  # of the old process
    assert (verdict, reason) == (Verdict.LATE, f"assignment {old} was revoked: its worker was started anew")
    assert opened.commit("bob") == (Verdict.ACCEPTED, "")


def test_a_round_ends_though_the_samples_of_a_lost_share_are_given_up():
    # Two have to answer, and bob's share is given up at its first loss: nothing is left for a second to answer for.
    play = Play(min_workers=2, attempts=1)
    play.ready("ann", "bob")
    play.decide(100.0)
    play.commit("ann")
    play.gone("bob")
    play.ready("cid")
    play.decide(101.0)
    if play.rounds.phase is Phase.OPEN and play.rounds.pending("cid"):  # handed something else: fine, too
        play.commit("cid")
    assert play.decide(1000.0).phase is Phase.AVERAGING


def test_a_round_ends_though_one_worker_took_over_the_shares_of_all_that_have_to_answer():
    # Both die and ann is back first: she gets both shares, and there is nothing left for bob to answer for.
    play = Play(min_workers=2)
    play.ready("ann", "bob")
    play.decide(100.0)
    play.gone("ann")
    play.gone("bob")
    play.ready("ann")
    play.decide(101.0)
    play.commit("ann")
    play.ready("bob")
    play.decide(102.0)
    if play.rounds.phase is Phase.OPEN and play.rounds.pending("bob"):  # handed something else: fine, too
        play.commit("bob")
    assert play.decide(1000.0).phase is Phase.AVERAGING


# answers that count for nothing


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.ABSTAINED])
def test_a_worker_that_only_yields_nan_never_holds_up_the_others(outcome):
    play = Play(min_workers=2, rounds=100)
    for number in range(6):
        now = 100.0 * number
        play.ready("ann", "nan")
        assert play.decide(now).phase is Phase.OPEN
        play.refuse("nan", outcome)
        assert play.decide(now + 1).phase is Phase.OPEN
        play.commit("ann")
        assert play.decide(now + 2).phase is Phase.AVERAGING
        assert play.contributors() == ["ann"]
        assert play.rounds.finish() == 4


@pytest.mark.parametrize(("outcome", "word"), [(Outcome.REJECTED, "rejected"), (Outcome.ABSTAINED, "abstained")])
def test_an_answer_that_counts_for_nothing_is_final_for_its_worker(opened, outcome, word):
    number = opened.id_of("bob")
    opened.refuse("bob", outcome, "w: 3 of 9 values are not finite")
    assert opened.rounds.answered("bob")
    assert opened.rounds.pending("bob") is None
    verdict, reason = opened.commit("bob", assignment=number)
    assert verdict is Verdict.LATE
    assert reason == f"assignment {number} was {word}: w: 3 of 9 values are not finite"


def test_a_refused_share_goes_to_one_that_waits(opened):
    opened.ready("dan")
    opened.refuse("bob")
    opened.decide(103.0)
    assert opened.ranges_of("dan") == ((3, 6),)


def test_a_committed_contribution_can_not_be_refused(opened):
    number = opened.id_of("ann")
    opened.commit("ann")
    opened.rounds.refuse("ann", 0, number, Outcome.REJECTED, "NaN")
    assert opened.contributors() == ["ann"]
    assert opened.rounds.plan.pool == []


def test_a_round_in_which_nothing_counted_is_void(opened):
    for name in ("ann", "bob", "cid"):
        opened.refuse(name, Outcome.ABSTAINED, "NaN")
    decision = opened.decide(103.0)
    assert (decision.phase, decision.reason) == (Phase.AVERAGING, "averaging 0 contributions")
    assert opened.rounds.finish() == 0
    assert (opened.rounds.number, opened.rounds.phase) == (1, Phase.WAITING)
    assert opened.rounds.plan.counted.total == 0
    opened.ready("ann", "bob", "cid")
    opened.decide(104.0)
    assert [opened.ranges_of(name) for name in ("ann", "bob", "cid")] == [((0, 3),), ((3, 6),), ((6, 9),)]


def test_an_average_that_can_not_be_used_makes_the_round_void(opened):
    for name in ("ann", "bob", "cid"):
        opened.commit(name)
    opened.decide(103.0)
    assert opened.rounds.finish(counted=False) == 0
    assert opened.rounds.number == 1
    assert opened.rounds.plan.counted.total == 0
    assert [(piece.start, piece.stop) for piece in opened.rounds.plan.pool] == [(0, 3), (3, 6), (6, 9)]


# commits


def test_the_same_commit_again_is_a_duplicate(opened):
    number = opened.id_of("ann")
    assert opened.commit("ann", 7) == (Verdict.ACCEPTED, "")
    assert opened.commit("ann", 7, assignment=number) == (Verdict.DUPLICATE, "it was accepted before")
    assert opened.contributors() == ["ann"]


def test_another_content_for_the_same_assignment_is_rejected(opened):
    number = opened.id_of("ann")
    opened.commit("ann", 7)
    verdict, reason = opened.commit("ann", 8, assignment=number)
    assert verdict is Verdict.REJECTED
    assert "another content was accepted" in reason
    assert [(each.worker, each.crc32) for each in opened.rounds.contributions] == [("ann", 7)]


def test_a_commit_is_a_duplicate_while_its_round_is_averaged(opened):
    number = opened.id_of("ann")
    for name in ("ann", "bob", "cid"):
        opened.commit(name)
    opened.decide(101.0)
    assert opened.commit("ann", 7, assignment=number)[0] is Verdict.DUPLICATE


def test_a_commit_of_a_round_that_is_over_is_late(opened):
    number = opened.id_of("ann")
    for name in ("ann", "bob", "cid"):
        opened.commit(name)
    opened.decide(101.0)
    opened.rounds.finish()
    verdict, reason = opened.commit("ann", assignment=number, round_=0)
    assert (verdict, reason) == (Verdict.LATE, "round 0 is over; the current one is 1")


def test_a_commit_of_a_round_to_come_is_not_called_over(opened):
    verdict, reason = opened.commit("ann", round_=5)
    assert verdict is Verdict.LATE
    assert "5" in reason
    assert "is over" not in reason


def test_nobody_commits_to_the_assignment_of_another(opened):
    number = opened.id_of("bob")
    verdict, reason = opened.commit("ann", assignment=number)
    assert (verdict, reason) == (Verdict.LATE, f"assignment {number} of round 0 is not ann's")
    assert opened.commit("ann", assignment=999)[0] is Verdict.LATE
    assert opened.contributors() == []


def test_what_is_committed_counts_though_its_worker_dies(opened):
    opened.commit("bob")
    opened.gone("bob")
    opened.commit("ann")
    opened.gone("cid")
    assert opened.decide(103.0).phase is Phase.AVERAGING
    assert opened.contributors() == ["ann", "bob"]
    assert opened.rounds.finish() == 6


def test_contributors_are_in_the_order_of_their_names_not_of_their_arrival():
    play = Play(min_workers=4)
    play.ready("dan", "ann", "cid", "bob")
    play.decide(0.0)
    for name in ("cid", "dan", "bob", "ann"):
        play.commit(name)
    assert play.contributors() == ["ann", "bob", "cid", "dan"]


def test_a_worker_that_restarts_after_its_commit_has_answered():
    play = Play(min_workers=2)
    play.ready("ann", "bob")
    play.decide(0.0)
    play.commit("ann")
    play.rounds.is_gone("ann", "its worker was started anew")
    assert play.rounds.answered("ann")
    play.gone("bob")
    assert play.decide(1.0).phase is Phase.OPEN  # one of two has answered


# empty shares


def test_a_share_may_be_empty_and_its_worker_waits_for_the_round():
    play = Play(min_workers=3, global_batch=2)
    play.ready("ann", "bob", "cid")
    play.decide(0.0)
    assert (play.ranges_of("ann"), play.ranges_of("bob"), play.ranges_of("cid")) == (((0, 1),), ((1, 2),), None)
    assert not play.rounds.answered("cid")
    play.commit("ann")
    play.commit("bob")
    assert play.decide(1.0).phase is Phase.AVERAGING  # three would be needed, but only two could answer


def test_a_worker_without_a_share_is_waited_for_in_the_next_round():
    play = Play(global_batch=1)
    play.ready("ann", "bob")
    play.decide(0.0)
    play.commit("ann")
    play.decide(0.0)
    play.rounds.finish()
    play.ready("ann")
    assert play.decide(1.0).reason == "waiting up to 3.0 s more for bob"


# the end


def test_a_run_ends_after_its_last_round():
    play = Play(rounds=2)
    play.full_round("ann", now=0.0)
    assert play.rounds.phase is Phase.WAITING
    play.full_round("ann", now=1.0)
    decision = play.decide(2.0)
    assert (decision.phase, decision.reason, decision.wake_s) == (Phase.ENDED, "all 2 rounds are done", None)
    play.ready("ann")
    assert play.decide(1e6).phase is Phase.ENDED
    assert play.rounds.number == 2
    assert play.rounds.pending("ann") is None


def test_asking_why_changes_nothing():
    play = Play(min_workers=1)
    play.ready("ann")
    for now in (0.0, 5.0, 1e6):
        assert play.rounds.explain(now, play.speeds).phase is Phase.WAITING
    assert play.rounds.assignments == {}


NAMES = st.sampled_from(["ann", "bob", "cid", "dan"])


class RoundsUnderFire(RuleBasedStateMachine):
    """Workers come, answer, die and come back in any order while time passes; a model keeps the books."""

    @initialize(
        min_workers=st.integers(1, 3), batch=st.integers(1, 7), attempts=st.integers(1, 3), by_speed=st.booleans()
    )
    def start(self, min_workers, batch, attempts, by_speed):
        self.play = Play(min_workers=min_workers, rounds=6, global_batch=batch, attempts=attempts, by_speed=by_speed)
        self.now = 0.0
        self.number = 0
        self.phase = Phase.WAITING
        self.quorum = 0
        self.answered: set[str] = set()
        self.accepted: dict[int, tuple[str, int, list[int]]] = {}  # of this round, by assignment
        self.counted: set[int] = set()
        self.old: list[tuple[str, int, int]] = []  # (worker, round, assignment) that is settled

    def drive(self):
        """What the aggregator does after every event."""
        decision = self.play.decide(self.now)
        rounds = self.play.rounds
        assert decision.phase is rounds.phase
        words = {Phase.AVERAGING: "averaging", Phase.ENDED: "all 6 rounds are done"}
        assert decision.reason.startswith(words.get(rounds.phase, rounds.phase.value))
        assert decision.wake_s is None or decision.wake_s >= self.now
        if self.phase is Phase.WAITING and rounds.phase is not Phase.WAITING:
            self.quorum = min(rounds.policy.min_workers, len(rounds.assignments))
            assert sum(each.samples for each in rounds.assignments.values()) == rounds.policy.global_batch
        self.phase = rounds.phase

    @rule(name=NAMES, speed=st.none() | st.floats(0.1, 100))
    def begin(self, name, speed):
        rounds = self.play.rounds
        if name not in self.play.speeds:
            self.play.speeds[name] = speed
        if rounds.pending(name) is None and not rounds.answered(name) and rounds.phase is not Phase.ENDED:
            self.play.ready(name)
        self.drive()

    @rule(name=NAMES, crc32=st.integers(0, 3))
    def commit(self, name, crc32):
        pending = self.play.rounds.pending(name)
        if pending is not None:
            assert self.play.commit(name, crc32) == (Verdict.ACCEPTED, "")
            samples = [number for start, stop in pending.ranges for number in range(start, stop)]
            self.accepted[pending.id] = (name, crc32, samples)
            self.answered.add(name)
        self.drive()

    @rule(data=st.data(), crc32=st.integers(0, 3))
    @precondition(lambda self: self.accepted)
    def commit_again(self, data, crc32):
        number = data.draw(st.sampled_from(sorted(self.accepted)))
        name, first, _ = self.accepted[number]
        verdict = self.play.commit(name, crc32, assignment=number)[0]
        assert verdict is (Verdict.DUPLICATE if crc32 == first else Verdict.REJECTED)

    @rule(data=st.data())
    @precondition(lambda self: self.old)
    def commit_too_late(self, data):
        name, round_, number = data.draw(st.sampled_from(self.old))
        verdict, reason = self.play.commit(name, assignment=number, round_=round_)
        assert verdict is Verdict.LATE
        assert reason

    @rule(name=NAMES, outcome=st.sampled_from([Outcome.REJECTED, Outcome.ABSTAINED]))
    def refuse(self, name, outcome):
        pending = self.play.rounds.pending(name)
        if pending is not None:
            self.play.refuse(name, outcome)
            self.answered.add(name)
            self.old.append((name, self.number, pending.id))
        self.drive()

    @rule(name=NAMES, restarted=st.booleans())
    def die(self, name, restarted):
        pending = self.play.rounds.pending(name)
        if pending is not None:
            self.old.append((name, self.number, pending.id))
        if restarted:
            self.play.rounds.is_gone(name, "started anew")
        else:
            self.play.gone(name)
        assert self.play.rounds.pending(name) is None
        self.drive()

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.0, 5.0, 10.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.drive()

    @rule(usable=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.phase is Phase.AVERAGING)
    def averaged(self, usable):
        rounds = self.play.rounds
        assert [(each.worker, each.id, each.crc32) for each in rounds.contributions] == sorted(
            (name, number, crc32) for number, (name, crc32, _) in self.accepted.items()
        )
        self.old += [
            (each.worker, self.number, each.id)
            for each in rounds.assignments.values()
            if (each.worker, self.number, each.id) not in self.old
        ]
        samples = [number for _, _, own in self.accepted.values() for number in own]
        assert rounds.finish(counted=usable) == (len(samples) if usable else 0)
        if usable:
            assert len(set(samples)) == len(samples)
            assert not self.counted & set(samples)
            self.counted |= set(samples)
        self.number += 1
        assert rounds.number == self.number
        self.phase, self.answered, self.accepted = rounds.phase, set(), {}
        self.drive()

    @invariant()
    def no_sample_is_in_two_shares(self):
        pending = [each for each in self.play.rounds.assignments.values() if each.outcome is Outcome.PENDING]
        out = [number for each in pending for start, stop in each.ranges for number in range(start, stop)]
        assert len(set(out)) == len(out)
        assert len({each.worker for each in pending}) == len(pending)

    @invariant()
    def every_sample_is_accounted_for(self):
        rounds, plan = self.play.rounds, self.play.rounds.plan
        held = [
            range(start, stop)
            for each in rounds.assignments.values()
            if each.outcome in (Outcome.PENDING, Outcome.COMMITTED)
            for start, stop in each.ranges
        ]
        back = [range(piece.start, piece.stop) for piece in (*plan.pool, *plan.skipped)]
        counted = [range(start, stop) for start, stop in plan.counted.ranges]
        assert sorted(number for piece in counted for number in piece) == sorted(self.counted)
        everything = sorted(number for piece in (*held, *back, *counted) for number in piece)
        assert everything == list(range(plan.high_water))

    @invariant()
    def a_round_closes_by_its_deadline_once_enough_have_answered(self):
        rounds = self.play.rounds
        if self.phase is Phase.OPEN:
            pending = [each for each in rounds.assignments.values() if each.outcome is Outcome.PENDING]
            overdue = self.now >= rounds.opened_s + rounds.policy.deadline_s
            assert len(self.answered) < self.quorum or (pending and not overdue)

    @invariant()
    def a_share_that_came_back_does_not_lie_about_while_somebody_waits_for_it(self):
        rounds = self.play.rounds
        if self.phase is Phase.OPEN:
            assert not (rounds.plan.pool and rounds.ready & self.play.speeds.keys())


RoundsUnderFire.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestRoundsUnderFire = RoundsUnderFire.TestCase
