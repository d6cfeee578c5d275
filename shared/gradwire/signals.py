"""SIGINT and SIGTERM: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The process was asked to end. Not an Exception, so that nothing swallows it on its way out."""


@contextlib.contextmanager
def raise_on_stop() -> Iterator[None]:
    """Raises Stopped in the main thread at the first signal; the second one exits at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in STOPS:
            signal.signal(each, _exit)
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in STOPS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def stop_event() -> asyncio.Event:
    """An event that the first signal sets; the second one exits at once. For the running loop of the main thread."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        event.set()
        for each in STOPS:
            loop.remove_signal_handler(each)
            signal.signal(each, _exit)

    for each in STOPS:
        loop.add_signal_handler(each, stop)
    return event


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
