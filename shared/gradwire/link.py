"""A worker's line to its aggregator: calls that are tried again, here and nowhere else, and a lease that is kept."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from grpc import aio

from gradwire import background
from gradwire.client import Client
from gradwire.errors import RETRYABLE, SessionExpired, Unavailable
from gradwire.retry import Retry
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire import calls

log = logging.getLogger("gradwire.session")

T = TypeVar("T")

SAME_NOTE_EVERY_S = 10.0
LEAVE_WITHIN_S = 3.0


class Link:
    """Runs the client's calls to their success, through whatever passes.

    rejoin: called when the lease has ended; makes a new session, after which the call is tried again.
    """

    def __init__(self, address: str, token: str | None, rejoin: Callable[[], None]) -> None:
        self.client = Client(address, token)
        self.retry = Retry()
        self.session = b""  # empty before the first join
        self.activity = "starting"
        self._rejoin = rejoin
        self._heartbeat: concurrent.futures.Future[None] | None = None
        self._said_s: dict[str, float] = {}
        background.run(self.client.open())

    def call(self, name: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The answer of a call. Raises what can't be helped by trying again, and Unavailable after trying for too long.

        attempt: makes the call once, with the session as it then is.
        """
        while True:
            try:
                return background.run(self._attempts(name, attempt))
            except SessionExpired as error:
                if not self.session:
                    raise
                log.warning("%s; joining again", error)
                self._rejoin()

    def say(self, text: str) -> None:
        """Logs why nothing moves, but not the same over and over. The first word is the subject."""
        subject, now = text.partition(" ")[0], time.monotonic()
        if now - self._said_s.get(subject, -math.inf) >= SAME_NOTE_EVERY_S:
            self._said_s[subject] = now
            log.info(text)

    def keep_alive(self, every_s: float) -> None:
        """Sends heartbeats from now on."""
        if self._heartbeat is None:
            self._heartbeat = background.submit(self._heartbeats(every_s))

    def close(self, goodbye: pb.LeaveRequest, last: concurrent.futures.Future[None] | None) -> None:
        """Says goodbye, where there is a session, and closes the channel. Tries once; waits a little for `last`."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        with contextlib.suppress(Exception):
            background.submit(self._close(goodbye, last)).result(timeout=3 * LEAVE_WITHIN_S)

    async def _attempts(self, name: str, attempt: Callable[[], Awaitable[T]]) -> T:
        first, failures, where = -math.inf, 0, f"{name} at {self.client.address}"
        for delay in self.retry.delays():
            try:
                return await attempt()
            except aio.AioRpcError as error:
                if error.code() not in RETRYABLE:
                    raise calls.error_from(error) from error
                now = time.monotonic()
                if not failures or self.client.heard_s > first:
                    first, failures = now, 0  # it went well until now
                failures += 1
                elapsed = now - first
                reason = f"{where}: {error.code().name}: {error.details()}"
                if self.retry.exhausted(error.code(), elapsed_s=elapsed, failures=failures):
                    raise Unavailable(f"gave up after {elapsed:.0f} s and {failures} tries: {reason}") from error
                left = self.retry.give_up_after_s - elapsed
                self.say(f"cannot reach the aggregator ({reason}); trying again for up to {left:.0f} s")
                await asyncio.sleep(delay)
        raise Unavailable(f"{where} was never tried")

    async def _heartbeats(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            with contextlib.suppress(Exception):  # whatever it is, the training thread's next call meets it
                await self.client.heartbeat(self.session, self.activity[:128], timeout_s=2 * every_s)

    async def _close(self, goodbye: pb.LeaveRequest, last: concurrent.futures.Future[None] | None) -> None:
        if last is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.wrap_future(last), LEAVE_WITHIN_S)
        if self.session:
            goodbye.session = self.session
            with contextlib.suppress(aio.AioRpcError):
                await self.client.leave(goodbye, timeout_s=LEAVE_WITHIN_S)
        await self.client.close()
