"""The process's one event loop, in a thread of its own.

grpc.aio works with one loop per process, and a training script has none. So the first session starts this one, on
uvloop where that exists, and every session of the process shares it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop loop where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def event_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process's background thread."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = new_event_loop()
            threading.Thread(target=_loop.run_forever, name="gradwire", daemon=True).start()
        return _loop


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Starts a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the background loop and waits for it. Ctrl-C cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def call_soon(callback: Callable[[], object]) -> None:
    """Calls `callback` on the background loop's thread."""
    event_loop().call_soon_threadsafe(callback)
