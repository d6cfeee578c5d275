"""Who is in: sessions, leases, incarnations. Pure: the time is passed in, in seconds of any monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gradwire.errors import SessionExpired, Superseded

# Weight of the newest measurement in a worker's speed.
SPEED_SMOOTHING: Final = 0.5
FASTEST: Final = 1e9  # samples per second


@dataclass
class Member:
    """A worker, through all its incarnations."""

    name: str
    device: str
    incarnation: bytes
    session: bytes
    joined_s: float
    heard_s: float
    present: bool = True
    activity: str = "joining"
    samples_per_second: float | None = None


class Roster:
    """Members by name and by session. A session not heard of for `lease_s` is over."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self.members: dict[str, Member] = {}
        self._sessions: dict[bytes, str] = {}

    def join(self, name: str, *, incarnation: bytes, session: bytes, device: str, now: float) -> tuple[Member, bool]:
        """Enters a worker; the session it had before, if any, is over at once.

        Returns the member, and whether it took the place of another incarnation that was present.
        """
        old = self.members.get(name)
        replaced = old is not None and old.present and old.incarnation != incarnation
        if old is not None and old.incarnation == incarnation:
            self._sessions.pop(old.session, None)  # its own process asks again: nobody was superseded
        member = Member(name, device, incarnation, session, joined_s=now, heard_s=now)
        if old is not None:
            member.samples_per_second = old.samples_per_second
        self.members[name] = member
        self._sessions[session] = name
        return member, replaced

    def hear(self, session: bytes, now: float) -> Member:
        """The member of a session, its lease renewed.

        Raises SessionExpired if its lease ended, Superseded if another process has joined under its name since.
        """
        name = self._sessions.get(session)
        if name is None:
            raise SessionExpired("the aggregator doesn't know this session")
        member = self.members[name]
        if member.session != session:
            raise Superseded(
                f"another process has joined as {name!r}; if that was not meant, give this worker another --name"
            )
        if not member.present:
            raise SessionExpired(f"the lease of {name!r} ended")
        member.heard_s = now
        return member

    def leave(self, member: Member) -> None:
        """Ends a session. It stays known, so that a process that slept through its end learns who took its place."""
        member.present = False

    def expire(self, now: float) -> list[Member]:
        """Ends the sessions whose lease is over, and returns their members."""
        gone = [m for m in self.members.values() if m.present and now - m.heard_s > self._lease_s]
        for member in gone:
            self.leave(member)
        return gone

    def next_expiry(self) -> float | None:
        """When the next lease ends if nothing more is heard."""
        return min((m.heard_s + self._lease_s for m in self.members.values() if m.present), default=None)

    def measured(self, name: str, *, samples: int, seconds: float) -> None:
        """Takes a measurement of a worker's speed into its exponential average."""
        if not seconds > samples / FASTEST:
            return  # no machine is so fast: a clock was wrong
        member, speed = self.members[name], samples / seconds
        before = member.samples_per_second
        member.samples_per_second = speed if before is None else before + SPEED_SMOOTHING * (speed - before)

    def at_most(self, name: str, *, samples: int, seconds: float) -> None:
        """A worker has not done so many samples in so much time: it is slower than that."""
        member = self.members[name]
        if seconds > 0 and (member.samples_per_second is None or member.samples_per_second > samples / seconds):
            member.samples_per_second = samples / seconds

    @property
    def present(self) -> dict[str, Member]:
        """The members whose lease runs, by name."""
        return {name: member for name, member in self.members.items() if member.present}
