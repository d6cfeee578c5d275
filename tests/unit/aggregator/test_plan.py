"""Every sample number is in exactly one place, and shares are as the speeds say."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gradwire_aggregator.plan import Plan, RangeSet

ATTEMPTS = 3


def numbers(pieces) -> list[int]:
    """The samples of Returned pieces or of ranges, in order."""
    pairs = [piece if isinstance(piece, tuple) else (piece.start, piece.stop) for piece in pieces]
    return [number for start, stop in pairs for number in range(start, stop)]


class PlanAgainstSets(RuleBasedStateMachine):
    """Shares go out, count, or are lost, in any order; a model of plain sets says what has to be where."""

    out = Bundle("out")

    def __init__(self) -> None:
        super().__init__()
        self.plan = Plan(inner_batch=2, attempts=ATTEMPTS)
        self.next_id = 0
        self.high_water = 0
        self.pool: set[int] = set()
        self.counted: set[int] = set()
        self.skipped: dict[int, str] = {}
        self.held: dict[int, list[int]] = {}
        self.failures: dict[int, int] = {}

    @rule(target=out, units=st.integers(0, 6), fresh=st.booleans())
    def take(self, units, fresh):
        samples, number = 2 * units, self.next_id
        self.next_id += 1
        ranges = self.plan.take(number, samples, fresh=fresh)

        expected = sorted(self.pool)[:samples]  # the pool goes first, lowest first
        self.pool -= set(expected)
        if fresh:
            more = samples - len(expected)
            expected += range(self.high_water, self.high_water + more)
            self.high_water += more
        assert numbers(ranges) == expected
        if not expected:
            return multiple()
        self.held[number] = expected
        return number

    @rule(number=consumes(out))
    def count(self, number):
        samples = self.held.pop(number)
        assert self.plan.count(number) == len(samples)
        assert not self.counted & set(samples)
        self.counted |= set(samples)

    @rule(number=consumes(out), reason=st.sampled_from(["late", "worker left", "rejected"]))
    def lose(self, number, reason):
        back = 0
        samples = self.held.pop(number)
        returned = self.plan.give_back(number, reason)
        for sample in samples:
            self.failures[sample] = self.failures.get(sample, 0) + 1
            if self.failures[sample] >= ATTEMPTS:
                self.skipped[sample] = reason
            else:
                self.pool.add(sample)
                back += 1
        assert returned == back

    @invariant()
    def every_sample_is_in_the_one_place_where_it_belongs(self):
        plan = self.plan
        assert plan.high_water == self.high_water
        assert numbers(plan.pool) == sorted(self.pool)
        assert numbers(plan.counted.ranges) == sorted(self.counted)
        assert plan.counted.total == len(self.counted)
        assert sorted(numbers(plan.skipped)) == sorted(self.skipped)
        places = [numbers(plan.pool), numbers(plan.counted.ranges), numbers(plan.skipped), *self.held.values()]
        assert sorted(number for place in places for number in place) == list(range(plan.high_water))

    @invariant()
    def what_is_skipped_says_why(self):
        for piece in self.plan.skipped:
            assert piece.attempts == ATTEMPTS
            assert {self.skipped[number] for number in range(piece.start, piece.stop)} == {piece.reason}


TestPlanAgainstSets = PlanAgainstSets.TestCase
TestPlanAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_new_samples_go_out_in_order():
    plan = Plan(inner_batch=1, attempts=3)
    assert plan.take(1, 4) == ((0, 4),)
    assert plan.take(2, 3) == ((4, 7),)
    assert plan.high_water == 7


def test_a_returned_share_goes_out_before_new_samples():
    plan = Plan(inner_batch=1, attempts=3)
    plan.take(1, 4)
    plan.take(2, 4)
    assert plan.give_back(1, "worker left") == 4
    assert plan.take(3, 6) == ((0, 4), (8, 10))


def test_a_returned_share_can_go_out_in_pieces():
    plan = Plan(inner_batch=1, attempts=3)
    plan.take(1, 4)
    plan.give_back(1, "late")
    assert plan.take(2, 1, fresh=False) == ((0, 1),)
    assert plan.take(3, 2, fresh=False) == ((1, 3),)
    assert plan.take(4, 2, fresh=False) == ((3, 4),)
    assert plan.take(5, 2, fresh=False) == ()


def test_a_share_lost_too_often_is_skipped_with_the_last_reason():
    plan = Plan(inner_batch=1, attempts=2)
    plan.take(1, 4)
    assert plan.give_back(1, "first reason") == 4
    plan.take(2, 4)
    assert plan.give_back(2, "second reason") == 0
    (skipped,) = plan.skipped
    assert (skipped.start, skipped.stop, skipped.attempts, skipped.reason) == (0, 4, 2, "second reason")
    assert plan.pool == []
    assert plan.take(3, 4) == ((4, 8),)


def test_an_attempt_is_counted_for_the_piece_that_failed_alone():
    plan = Plan(inner_batch=1, attempts=2)
    plan.take(1, 4)
    plan.give_back(1, "late")
    plan.take(2, 2)
    plan.take(3, 4)
    plan.count(2)
    plan.give_back(3, "late again")  # 2 and 3 a second time, 4 and 5 for the first time
    assert numbers(plan.counted.ranges) == [0, 1]
    assert numbers(plan.skipped) == [2, 3]
    assert numbers(plan.pool) == [4, 5]


def test_what_is_counted_can_not_be_counted_or_given_back_again():
    plan = Plan(inner_batch=1, attempts=2)
    plan.take(1, 4)
    plan.count(1)
    with pytest.raises(KeyError):
        plan.count(1)
    with pytest.raises(KeyError):
        plan.give_back(1, "late")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=20))
def test_ranges_are_disjoint_ascending_and_merged(pieces):
    ranges, model = RangeSet(), set()
    for start, length in pieces:
        piece = set(range(start, start + length))
        if model & piece:
            before = list(ranges.ranges)
            with pytest.raises(ValueError, match=rf"\[{start}, {start + length}\) counts twice"):
                ranges.add(start, start + length)
            assert ranges.ranges == before
        else:
            ranges.add(start, start + length)
            model |= piece
    assert numbers(ranges.ranges) == sorted(model)
    assert ranges.total == len(model)
    for (_, stop), (start, _) in zip(ranges.ranges, ranges.ranges[1:], strict=False):
        assert stop < start  # those that touch are one


SPEEDS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3), st.none() | st.floats(0, 1e6), min_size=1, max_size=9
)


@given(SPEEDS, st.integers(0, 60), st.sampled_from([1, 3, 16]))
def test_shares_are_proportional_to_speed_within_one_inner_batch(speeds, units, inner_batch):
    shares = Plan(inner_batch=inner_batch, attempts=3).split(units * inner_batch, speeds)

    assert shares.keys() == speeds.keys()
    assert sum(shares.values()) == units * inner_batch
    assert all(share >= 0 and share % inner_batch == 0 for share in shares.values())
    known = [Fraction(speed) for speed in speeds.values() if speed is not None]
    average = sum(known) / len(known) if known else Fraction(1)
    weights = {name: average if speed is None else Fraction(speed) for name, speed in speeds.items()}
    total = sum(weights.values())
    for name, share in shares.items():
        exact = units * (weights[name] / total if total else Fraction(1, len(weights)))
        assert abs(share // inner_batch - exact) < 1 + Fraction(1, 10**6)


@given(SPEEDS, st.integers(0, 60))
def test_shares_do_not_depend_on_the_order_of_the_workers(speeds, units):
    plan = Plan(inner_batch=1, attempts=3)
    assert plan.split(units, speeds) == plan.split(units, dict(reversed(speeds.items())))


@pytest.mark.parametrize(
    ("speeds", "samples", "inner_batch", "shares"),
    [
        ({"a": 1.0, "b": 3.0}, 16, 1, {"a": 4, "b": 12}),
        ({"a": 1.0, "b": 3.0, "c": None}, 18, 1, {"a": 3, "b": 9, "c": 6}),  # c as the average, 2.0
        ({"a": None, "b": None}, 8, 2, {"a": 4, "b": 4}),
        ({"a": None, "b": None, "c": None}, 8, 1, {"a": 3, "b": 3, "c": 2}),  # a tie goes to the first names
        ({"a": 0.0, "b": 2.0}, 8, 1, {"a": 0, "b": 8}),
        ({"a": 0.0, "b": 0.0}, 8, 1, {"a": 4, "b": 4}),  # nobody is known to do anything: all alike
        ({"a": 1.0, "b": 1.0, "c": 1.0}, 32, 16, {"a": 16, "b": 16, "c": 0}),  # more workers than units
        ({"a": 1.0, "b": 2.0, "c": 2.0}, 7, 1, {"a": 1, "b": 3, "c": 3}),  # 1.4, 2.8, 2.8
        ({"only": 5.0}, 320, 16, {"only": 320}),
    ],
)
def test_split(speeds, samples, inner_batch, shares):
    assert Plan(inner_batch=inner_batch, attempts=3).split(samples, speeds) == shares
