"""The workers' side: prepared messages out, answers in, and when. Several workers, each with a connection of its own.

Driven by lines of JSON on standard input, each answered by one on standard output:
  {"do": "join", "aggregator": HOST:PORT, "workers": {NAME: FILE}, "join": FILE, "snapshot": FILE}
  {"do": "bare", "address": HOST:PORT}       connects to the bare server as well
  {"do": "begin", "round": R}                waits until all have a share
  {"do": "round", "round": R, "at": T}       at time T of the monotonic clock all contribute, then collect
  {"do": "bare_round", "round": R, "at": T}  the same messages through the bare server
  {"do": "keep", "path": FILE}               writes what was downloaded last
  {"do": "metrics", "address": HOST:PORT}    the sums of gradwire_phase_seconds
  {"do": "leave"}
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from benchmarks import bare
from benchmarks.recorded import read_messages, write_messages
from gradwire import background
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire.channel import CLIENT

# Without its own pool, all channels of a process to one address would share a connection.
OPTIONS: Final = [*CLIENT, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
SERVICE: Final = "gradwire.v1.AggregationService"
_PHASE: Final = re.compile(r'^gradwire_phase_seconds_sum\{phase="(\w+)"\} (\S+)$', re.MULTILINE)


class Worker:
    """One worker: its connection to the aggregator, and one to the bare server."""

    def __init__(self, name: str, address: str, contribution: list[bytes]) -> None:
        self.name = name
        self.downloaded: list[bytes] = []
        self._messages = contribution
        self._channel = aio.insecure_channel(address, options=OPTIONS)
        self._bare: aio.Channel | None = None
        self._session = b""
        self._assignment = pb.BeginResponse()

    async def join(self, messages: list[bytes], snapshot: list[bytes]) -> None:
        """Joins the run, and publishes its first weights if asked to."""
        header = pb.JoinRequest.FromString(messages[0]).header
        header.worker, header.incarnation = self.name, secrets.token_bytes(16)
        first = pb.JoinRequest(header=header).SerializeToString()
        welcome = pb.JoinResponse.FromString(await self._send(self._channel, "Join", [first, *messages[1:]]))
        self._session = welcome.session
        if welcome.start_from == pb.START_FROM_PUBLISH:
            session = pb.PublishSnapshotRequest(session=self._session).SerializeToString()
            await self._send(self._channel, "PublishSnapshot", [session, *snapshot])

    async def connect_bare(self, address: str) -> None:
        """Opens the connection to the bare server."""
        self._bare = aio.insecure_channel(address, options=OPTIONS)
        await self._bare.channel_ready()

    async def begin(self, number: int) -> None:
        """Waits for a share of a round."""
        request = pb.BeginRequest(session=self._session, round=number).SerializeToString()
        method: Any = self._channel.unary_unary(f"/{SERVICE}/Begin")
        while True:
            answer = pb.BeginResponse.FromString(await method(request))
            if answer.order == pb.ORDER_TRAIN:
                self._assignment = answer
                return
            if answer.order != pb.ORDER_WAIT:
                raise RuntimeError(f"{self.name} was told {pb.Order.Name(answer.order)}: {answer.reason}")

    async def round(self, number: int, at: float) -> dict[str, float]:
        """Contributes and collects; seconds of the monotonic clock."""
        share = self._assignment
        header = pb.ContributeHeader(
            session=self._session,
            round=number,
            assignment=share.assignment,
            samples=sum(each.stop - each.start for each in share.ranges),
            train_seconds=1.0,
            loss=1.0,
        )
        messages = [pb.ContributeRequest(header=header).SerializeToString(), *self._messages]
        await asyncio.sleep(at - time.monotonic())
        marks = {"start": time.monotonic()}
        verdict = pb.ContributeResponse.FromString(await self._send(self._channel, "Contribute", messages))
        marks["answered"] = time.monotonic()
        if verdict.verdict != pb.VERDICT_ACCEPTED:
            raise RuntimeError(f"{self.name}: {pb.Verdict.Name(verdict.verdict)}: {verdict.reason}")
        request = pb.CollectRequest(session=self._session, round=number).SerializeToString()
        await self._receive(self._channel.unary_stream(f"/{SERVICE}/Collect"), request, marks)
        return marks

    async def bare_round(self, number: int, at: float) -> dict[str, float]:
        """The same bytes through the bare server."""
        if self._bare is None:
            raise RuntimeError("there is no connection to the bare server yet")
        messages = [b"x" * 64, *self._messages]
        await asyncio.sleep(at - time.monotonic())
        marks = {"start": time.monotonic()}
        await self._send(self._bare, "Upload", messages, service=bare.SERVICE)
        marks["answered"] = time.monotonic()
        await self._receive(self._bare.unary_stream(f"/{bare.SERVICE}/Download"), str(number).encode(), marks)
        return marks

    async def leave(self) -> None:
        """Leaves the run and closes the connections."""
        request = pb.LeaveRequest(session=self._session, reason="the benchmark is done").SerializeToString()
        method: Any = self._channel.unary_unary(f"/{SERVICE}/Leave")
        await method(request)
        await self._channel.close()
        if self._bare is not None:
            await self._bare.close()

    async def _send(self, channel: aio.Channel, method: str, messages: list[bytes], *, service: str = SERVICE) -> bytes:
        call: aio.StreamUnaryCall[bytes, bytes] = channel.stream_unary(f"/{service}/{method}")()
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # the answer says why
            for message in messages:
                await call.write(message)
            await call.done_writing()
        return await call

    async def _receive(self, method: Any, request: bytes, marks: dict[str, float]) -> None:
        """Collects a stream. The first mark is that of the aggregate's header: notes that come before don't count."""
        messages: list[bytes] = []
        async for message in method(request):
            if not messages:
                if pb.CollectResponse.FromString(message).WhichOneof("kind") == "note":
                    continue
                marks["first"] = time.monotonic()
            messages.append(message)
            marks["last"] = time.monotonic()
        if not messages or pb.CollectResponse.FromString(messages[-1]).WhichOneof("kind") != "commit":
            raise RuntimeError(f"{self.name}: the download ended early")
        self.downloaded = messages


class Load:
    """All workers of this process."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    async def join(self, aggregator: str, workers: dict[str, str], join: str, snapshot: str) -> None:
        """Makes the workers and joins them to a run, one after the other."""
        self._workers = [Worker(name, aggregator, read_messages(Path(path))) for name, path in workers.items()]
        for worker in self._workers:
            await worker.join(read_messages(Path(join)), read_messages(Path(snapshot)))

    async def bare(self, address: str) -> None:
        """Connects all to the bare server."""
        await asyncio.gather(*(worker.connect_bare(address) for worker in self._workers))

    async def begin(self, round: int) -> None:
        """Waits until all have a share."""
        await asyncio.gather(*(worker.begin(round) for worker in self._workers))

    async def round(self, round: int, at: float) -> dict[str, Any]:
        """One round: the marks of all workers, and the digest of what each downloaded."""
        return self._digested(await asyncio.gather(*(worker.round(round, at) for worker in self._workers)))

    async def bare_round(self, round: int, at: float) -> dict[str, Any]:
        """One round through the bare server."""
        return self._digested(await asyncio.gather(*(worker.bare_round(round, at) for worker in self._workers)))

    async def keep(self, path: str) -> None:
        """Writes what the first worker downloaded last."""
        write_messages(Path(path), self._workers[0].downloaded)

    async def metrics(self, address: str) -> dict[str, float]:
        """Seconds that the run has spent in each phase, as its /metrics says."""
        text = await asyncio.to_thread(_read_text, f"http://{address}/metrics")
        return {phase: float(seconds) for phase, seconds in _PHASE.findall(text)}

    async def leave(self) -> None:
        """Leaves the run."""
        await asyncio.gather(*(worker.leave() for worker in self._workers))

    def _digested(self, marks: list[dict[str, float]]) -> dict[str, Any]:
        # Without the header, which names the round.
        digests = [hashlib.sha256(b"".join(worker.downloaded[1:])).hexdigest() for worker in self._workers]
        return {"marks": marks, "digests": digests}


def _read_text(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return str(answer.read().decode())


async def serve() -> None:
    """Does what the lines say until there are no more."""
    load, loop = Load(), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        try:
            answer = {"ok": await getattr(load, command.pop("do"))(**command)}
        except (aio.AioRpcError, RuntimeError, OSError) as error:
            details = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
            answer = {"error": details}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Serves until standard input ends."""
    with contextlib.closing(background.new_event_loop()) as loop, contextlib.suppress(KeyboardInterrupt):
        loop.run_until_complete(serve())


if __name__ == "__main__":
    main()
