"""A worker's snapshots: the run's newest one loaded, its own published when the run asks for it."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

from grpc import aio

from gradwire import background, state
from gradwire.client import Download
from gradwire.errors import GradwireError
from gradwire.exchange import Replica
from gradwire.link import Link

log = logging.getLogger("gradwire.session")


@dataclass
class Traffic:
    """Payload bytes that crossed the wire, as packed."""

    upload_bytes: int = 0
    download_bytes: int = 0


class Snapshots:
    """Moves whole states over a link, and counts their bytes in `traffic`."""

    def __init__(self, link: Link, traffic: Traffic) -> None:
        self._link = link
        self._traffic = traffic
        self.publishing: concurrent.futures.Future[None] | None = None

    def load(self, replica: Replica) -> int:
        """Loads the newest snapshot into a replica; waits for it if there is none yet. Returns its round.

        Raises GradwireError if it arrived damaged.
        """
        self._link.activity = "loading a snapshot"
        download = Download()

        def attempt() -> Awaitable[None]:
            return self._link.client.fetch_snapshot(
                self._link.session, download, lambda note: self._link.say(f"waiting for a snapshot: {note}")
            )

        self._link.call("FetchSnapshot", attempt)
        self._traffic.download_bytes += len(download.data)
        if not download.intact:
            raise GradwireError("the snapshot from the aggregator arrived damaged; start the worker again")
        replica.load_snapshot(state.unpack(bytes(download.data)))
        return download.header.round

    def publish(self, replica: Replica, round_: int) -> None:
        """Publishes a replica's state as the weights of a round, and waits for it."""
        data, session = state.pack(replica.snapshot()), self._link.session

        async def attempt() -> None:
            # If the lease ended meanwhile, joining again has settled whose weights are the first.
            if self._link.session == session:
                await self._publish(round_, data)

        self._link.call("PublishSnapshot", attempt)

    def publish_beside(self, replica: Replica, round_: int) -> None:
        """Publishes while training goes on; if that fails, the aggregator asks somebody again."""
        if self.publishing is None or self.publishing.done():
            data = state.pack(replica.snapshot())
            self.publishing = background.submit(self._try_to_publish(round_, data))

    async def _try_to_publish(self, round_: int, data: bytes) -> None:
        try:
            await self._publish(round_, data)
        except aio.AioRpcError as error:
            log.warning("the snapshot of round %d was not published: %s", round_, error.details())

    async def _publish(self, round_: int, data: bytes) -> None:
        await self._link.client.publish_snapshot(self._link.session, round_, data)
        self._traffic.upload_bytes += len(data)
