"""Who publishes the state that joiners start from, and when. Pure: asks the roster and the store, changes neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gradwire.errors import ProtocolError
from gradwire.manifest import Manifest
from gradwire_aggregator.roster import Member, Roster
from gradwire_aggregator.store import Store

# A snapshot holds weights, buffers and optimizer state: a small multiple of the float32 weights.
SIZE_FACTOR: Final = 8
SIZE_SLACK_BYTES: Final = 64 << 20


@dataclass
class Snapshots:
    """Asks one worker at a time: the first for round 0, then somebody every `every` rounds."""

    every: int
    roster: Roster
    store: Store
    publisher: str = ""  # who was asked last
    _asked_round: int = -1

    def must_publish(self, member: Member) -> bool:
        """Whether this worker is the one whose first weights become the run's."""
        if self.lacks_publisher():
            self.publisher = member.name
        return self.store.snapshot is None and self.publisher == member.name

    def lacks_publisher(self) -> bool:
        """Whether there is no snapshot yet, and the worker that was asked for the first one is gone."""
        asked = self.roster.members.get(self.publisher)
        return self.store.snapshot is None and (asked is None or not asked.present)

    def wants(self, member: Member, round_: int) -> bool:
        """Whether this worker, with the weights of the current round, is to publish them."""
        newest = self.store.snapshot
        if newest is None or round_ - newest.round < self.every:
            return False
        asked = self.roster.members.get(self.publisher)
        waiting = asked is not None and asked.present and self._asked_round > newest.round
        if waiting and round_ - self._asked_round < self.every:
            return False
        self.publisher, self._asked_round = member.name, round_
        return True

    def check(self, member: Member, round_: int, size: int, *, current: int, manifest: Manifest | None) -> None:
        """Raises ProtocolError unless this worker may publish such a snapshot now, in round `current`."""
        if member.name != self.publisher:
            raise ProtocolError(f"{member.name} was not asked for a snapshot")
        oldest = self.store.oldest_round
        first = oldest if oldest is not None else current
        if not first <= round_ <= current:
            raise ProtocolError(f"a snapshot of round {round_} is of no use: the rounds kept start at {first}")
        elements = sum(entry.elements for entry in manifest or ())
        if size > SIZE_FACTOR * 4 * elements + SIZE_SLACK_BYTES:
            raise ProtocolError(f"a snapshot of {size} bytes is too large for {elements} elements")
