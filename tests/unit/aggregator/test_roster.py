"""Leases, incarnations and speeds. Times are given, so nothing here waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import SessionExpired, Superseded
from gradwire_aggregator.roster import Roster

LEASE_S = 10.0
FIRST, SECOND = b"incarnation one.", b"incarnation two."


def join(roster, name="ann", *, incarnation=FIRST, session=b"s1", now=0.0):
    return roster.join(name, incarnation=incarnation, session=session, device="cpu", now=now)


def test_a_worker_that_joined_is_present():
    roster = Roster(LEASE_S)
    member, replaced = join(roster)
    assert not replaced
    assert roster.present == {"ann": member}
    assert roster.hear(b"s1", 1.0) is member


def test_a_session_that_nobody_joined_with_is_expired():
    with pytest.raises(SessionExpired):
        Roster(LEASE_S).hear(b"nobody", 0.0)


def test_a_lease_lasts_to_its_last_moment_and_no_longer():
    roster = Roster(LEASE_S)
    member, _ = join(roster, now=5.0)
    assert roster.next_expiry() == 15.0
    assert roster.expire(15.0) == []
    assert roster.expire(15.001) == [member]
    assert not member.present
    assert roster.present == {}


def test_hearing_of_a_worker_renews_its_lease():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    roster.hear(b"s1", 8.0)
    assert roster.next_expiry() == 18.0
    assert roster.expire(17.9) == []
    assert [member.name for member in roster.expire(18.1)] == ["ann"]


def test_a_lease_ends_only_once():
    roster = Roster(LEASE_S)
    join(roster)
    assert len(roster.expire(11.0)) == 1
    assert roster.expire(12.0) == []
    assert roster.next_expiry() is None


def test_a_session_whose_lease_ended_is_expired():
    roster = Roster(LEASE_S)
    join(roster)
    roster.expire(11.0)
    with pytest.raises(SessionExpired):
        roster.hear(b"s1", 11.0)


def test_a_worker_that_left_is_expired():
    roster = Roster(LEASE_S)
    member, _ = join(roster)
    roster.leave(member)
    assert roster.present == {}
    with pytest.raises(SessionExpired):
        roster.hear(b"s1", 1.0)


def test_a_new_incarnation_starts_at_once_and_ends_the_old_session():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    member, replaced = join(roster, incarnation=SECOND, session=b"s2", now=1.0)
    assert replaced
    assert roster.present == {"ann": member}
    assert roster.hear(b"s2", 2.0) is member
    with pytest.raises(Superseded, match="'ann'"):
        roster.hear(b"s1", 2.0)


def test_a_superseded_process_does_not_renew_the_lease_of_the_new_one():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    join(roster, incarnation=SECOND, session=b"s2", now=1.0)
    with pytest.raises(Superseded):
        roster.hear(b"s1", 9.0)
    assert roster.next_expiry() == 11.0


def test_a_superseded_process_stays_superseded_when_the_new_one_is_gone():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    join(roster, incarnation=SECOND, session=b"s2", now=1.0)
    roster.expire(20.0)
    with pytest.raises(Superseded):
        roster.hear(b"s1", 20.0)


def test_the_same_incarnation_may_join_again():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    member, replaced = join(roster, session=b"s2", now=1.0)  # its first answer was lost, say
    assert not replaced
    assert roster.hear(b"s2", 1.0) is member
    with pytest.raises(SessionExpired):  # and not Superseded, on which the process would end
        roster.hear(b"s1", 2.0)


def test_the_same_incarnation_may_join_again_after_its_lease_ended():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    roster.expire(20.0)
    member, replaced = join(roster, session=b"s2", now=21.0)
    assert not replaced
    assert roster.hear(b"s2", 22.0) is member
    assert roster.present == {"ann": member}


def test_a_restart_after_the_lease_ended_takes_nobodys_place():
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    roster.expire(20.0)
    _, replaced = join(roster, incarnation=SECOND, session=b"s2", now=21.0)
    assert not replaced


def test_a_process_that_slept_past_its_lease_does_not_oust_the_one_that_replaced_it():
    # A lid is closed, the worker is started anew by other means, the lid is opened: the old process has to end. Told
    # that its session expired it would join again, and the new one would have to end.
    roster = Roster(LEASE_S)
    join(roster, now=0.0)
    roster.expire(20.0)
    join(roster, incarnation=SECOND, session=b"s2", now=21.0)
    with pytest.raises(Superseded):
        roster.hear(b"s1", 22.0)


def test_workers_do_not_share_leases():
    roster = Roster(LEASE_S)
    join(roster, "ann", session=b"s1", now=0.0)
    join(roster, "bob", session=b"s2", now=3.0)
    assert roster.next_expiry() == 10.0
    assert [member.name for member in roster.expire(11.0)] == ["ann"]
    assert list(roster.present) == ["bob"]
    assert roster.next_expiry() == 13.0


def test_the_first_measurement_is_the_speed():
    roster = Roster(LEASE_S)
    member, _ = join(roster)
    assert member.samples_per_second is None
    roster.measured("ann", samples=30, seconds=2.0)
    assert member.samples_per_second == 15.0


@given(st.lists(st.tuples(st.integers(1, 1000), st.sampled_from([0.25, 0.5, 1.0, 2.0])), min_size=1, max_size=10))
def test_the_speed_is_an_exponential_average_of_weight_one_half(measurements):
    roster = Roster(LEASE_S)
    member, _ = join(roster)
    for samples, seconds in measurements:
        roster.measured("ann", samples=samples, seconds=seconds)
    first, *rest = [samples / seconds for samples, seconds in measurements]
    expected = first * 0.5 ** len(rest) + sum(x * 0.5 ** (len(rest) - n) for n, x in enumerate(rest))
    assert member.samples_per_second == pytest.approx(expected)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_measurement_of_no_time_is_none(seconds):
    roster = Roster(LEASE_S)
    member, _ = join(roster)
    roster.measured("ann", samples=10, seconds=seconds)
    assert member.samples_per_second is None


def test_the_speed_outlives_a_restart():
    roster = Roster(LEASE_S)
    join(roster)
    roster.measured("ann", samples=30, seconds=2.0)
    member, _ = join(roster, incarnation=SECOND, session=b"s2", now=1.0)
    assert member.samples_per_second == 15.0
