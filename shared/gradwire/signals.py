"""SIGINT, SIGTERM and SIGHUP: the first asks for an orderly end, the second ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

STOPS = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in signal.Signals.__members__)


class Stopped(BaseException):
    """The process was asked to end. Not an Exception, so that nothing swallows it on its way out."""


@contextlib.contextmanager
def raise_on_stop() -> Iterator[None]:
    """Raises Stopped in the main thread at the first signal; the second one exits at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, _exit)
        raise Stopped(signal.Signals(number).name)

    # What is ignored stays so: that is how nohup works.
    heeded = [each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, stop) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def stop_event() -> asyncio.Event:
    """An event that the first signal sets; the second one exits at once. For the running loop of the main thread."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    heeded = [each for each in STOPS if signal.getsignal(each) is not signal.SIG_IGN]

    def stop() -> None:
        event.set()
        for each in heeded:
            loop.remove_signal_handler(each)
            signal.signal(each, _exit)

    for each in heeded:
        loop.add_signal_handler(each, stop)
    return event


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
