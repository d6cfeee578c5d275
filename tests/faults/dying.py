"""`gradwire aggregator` that kills itself with SIGKILL at a named point of a round: dying.py POINT ROUND CONFIG ..."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from gradwire import cli
from gradwire_aggregator import run, servicer
from gradwire_aggregator.ledger import Ledger
from gradwire_aggregator.run import Run
from gradwire_aggregator.store import Store

POINT, ROUND = sys.argv[1], int(sys.argv[2])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str, is_time: Callable[..., bool]) -> None:
    """Dies instead of a call."""
    wrapped = getattr(owner, name)

    @functools.wraps(wrapped)
    def dying(*arguments: Any, **options: Any) -> Any:
        if is_time(*arguments):
            die()
        return wrapped(*arguments, **options)

    setattr(owner, name, dying)


def inject() -> None:
    match POINT:
        case "in an upload":
            before(servicer, "_add_all", lambda reader, parts: rounds() == ROUND)
        case "after a commit":
            wrapped = Run.receive

            def receive(self: Run, *arguments: Any) -> Any:
                answer = wrapped(self, *arguments)
                if self.rounds.number == ROUND:
                    die()
                return answer

            Run.receive = receive  # type: ignore[method-assign]
        case "before the average":
            before(run, "mean", lambda manifest, received: rounds() == ROUND)
        case "before the file":
            before(Store, "write_aggregate", lambda self, number, messages: number == ROUND)
        case "between file and ledger":
            before(Ledger, "add_round", lambda self, record, *rest: record.round == ROUND)
        case "between ledger and broadcast":
            before(Store, "keep_aggregate", lambda self, number, messages: number == ROUND)
        case "in the broadcast":
            collect = servicer.Servicer.Collect

            async def broken_off(self: Any, request: Any) -> Any:
                async for message in collect(self, request):
                    yield message
                    if request.round == ROUND and self._run.rounds.number > ROUND:
                        die()

            servicer.Servicer.Collect = broken_off  # type: ignore[method-assign]
        case "before a snapshot is entered":
            before(Ledger, "add_snapshot", lambda self, snapshot: snapshot.round >= ROUND)
        case "before old files are unlinked":
            before(Store, "put_snapshot", lambda self, snapshot: snapshot.round >= ROUND)
        case _:
            raise SystemExit(f"no such point: {POINT}")


def rounds() -> int:
    """The current round of the one run in this process."""
    return RUNS[0].rounds.number


RUNS: list[Run] = []


def remember(self: Run, *arguments: Any, __init__: Any = Run.__init__) -> None:
    __init__(self, *arguments)
    RUNS.append(self)


if __name__ == "__main__":
    Run.__init__ = remember  # type: ignore[method-assign]
    inject()
    sys.argv = ["gradwire", "aggregator", *sys.argv[3:]]
    cli.main()
