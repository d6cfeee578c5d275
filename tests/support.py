"""An aggregator inside the test process, and workers that speak its protocol by hand.

Everything runs on gradwire's background loop, so tests are plain functions:

    with aggregator(run_config(rounds=3)) as serving, RawWorker(serving.address, "ann") as ann:
        ann.join()
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from grpc import aio

from gradwire import background, codec
from gradwire.codec import Dense, Encoded, TopK
from gradwire.config import RunConfig, parse_config
from gradwire.corpus import Corpus
from gradwire.manifest import Entry, Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1.aggregation_pb2_grpc import AggregationServiceStub
from gradwire.wire import calls
from gradwire.wire.channel import PROTOCOL, open_channel
from gradwire.wire.messages import PartReader, Tally, absent_positions, write_parts
from gradwire.wire.schemas import entry_batches
from gradwire_aggregator.server import Serving, serve

TIMEOUT_S = 20.0

MANIFEST = Manifest(
    "test",
    (
        Entry("layer.weight", (64, 64), TopK(k=4, chunk=256, layout="flat", indices="u16", dense_below=0)),
        Entry("layer.bias", (64,), Dense("fp32")),
        Entry("scale", (), Dense("bf16")),
    ),
)


def run_config(*, rounds: int = 10, global_batch: int = 8, shares: str = "fixed", **round_: Any) -> RunConfig:
    """A run on a free port of loopback; `round_` are keys of [round]."""
    values = {
        "name": "test",
        "rounds": rounds,
        "batch": {"global_batch": global_batch, "inner_batch": 1, "shares": shares},
        "round": {"min_workers": 2, **round_},
        "server": {"listen": "127.0.0.1:0", "http": ""},
    }
    return parse_config(values, source="test")


@contextlib.contextmanager
def aggregator(
    config: RunConfig, corpus: Corpus | None = None, *, data: Path | None = None, token: str | None = None
) -> Iterator[Serving]:
    """Serves a run on the background loop while the context lasts."""
    stack = contextlib.AsyncExitStack()
    serving = background.run(stack.enter_async_context(serve(config, corpus, data=data, token=token, grace_s=0.0)))
    try:
        yield serving
    finally:
        background.run(stack.aclose())


def contribution(seed: int, manifest: Manifest = MANIFEST) -> list[Encoded]:
    """Encoded random tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [
        codec.encode(torch.randn(entry.shape, generator=generator), entry.scheme, name=entry.name) for entry in manifest
    ]


def decoded(tensors: Sequence[Encoded | None], manifest: Manifest = MANIFEST) -> list[torch.Tensor]:
    """What encoded tensors, none of them absent, stand for."""
    return [
        codec.decode(each, entry.scheme, entry.shape)
        for each, entry in zip(tensors, manifest, strict=True)
        if each is not None
    ]


class RawWorker:
    """One worker without a session of gradwire's: no retries, no heartbeats, no checks. A context manager."""

    def __init__(self, address: str, name: str, *, manifest: Manifest = MANIFEST, token: str | None = None) -> None:
        self.name = name
        self.manifest = manifest
        self.session = b""
        self.incarnation = secrets.token_bytes(16)
        self._metadata = calls.metadata(token)
        self.channel: aio.Channel = background.run(_opened(address))
        self._stub: Any = AggregationServiceStub(self.channel)

    def __enter__(self) -> RawWorker:
        return self

    def __exit__(self, *error: object) -> None:
        background.run(_closed(self.channel))

    # Joining.

    def join(
        self, *, publish: bool = True, entry_messages: Iterable[Any] | None = None, **header: Any
    ) -> pb.JoinResponse:
        """Joins, and publishes its first weights if asked to; `header` replaces fields of the header."""
        values: dict[str, Any] = {
            "protocol": PROTOCOL,
            "run": "test",
            "worker": self.name,
            "incarnation": self.incarnation,
            "device": "cpu",
            "method": self.manifest.method,
            "entries": len(self.manifest),
            "manifest_sha256": self.manifest.fingerprint,
            **header,
        }
        batches = entry_batches(self.manifest) if entry_messages is None else [list(entry_messages)]
        requests = [pb.JoinRequest(header=pb.JoinHeader(**values))]
        requests += [pb.JoinRequest(entries=pb.ManifestEntries(entries=batch)) for batch in batches]
        answer: pb.JoinResponse = self.stream("Join", requests)
        self.session = answer.session
        if publish and answer.start_from == pb.START_FROM_PUBLISH:
            self.publish()
        return answer

    def publish(self, data: bytes = b"the first weights", round_: int = 0, **header: Any) -> pb.PublishSnapshotResponse:
        """Publishes bytes as the weights of a round."""
        values: dict[str, Any] = {"round": round_, "size": len(data), "sha256": hashlib.sha256(data).digest(), **header}
        answer: pb.PublishSnapshotResponse = self.stream(
            "PublishSnapshot",
            [
                pb.PublishSnapshotRequest(session=self.session),
                pb.PublishSnapshotRequest(header=pb.SnapshotHeader(**values)),
                *(pb.PublishSnapshotRequest(data=piece) for piece in calls.slices(data)),
            ],
        )
        return answer

    def leave(self) -> None:
        """Says goodbye."""
        self.unary("Leave", pb.LeaveRequest(session=self.session, reason="test"))

    # A round.

    def begin(self, round_: int = 0) -> pb.BeginResponse:
        """What to do about a round, once that is decided."""
        return self.begin_soon(round_).result(TIMEOUT_S)

    def begin_soon(self, round_: int = 0) -> concurrent.futures.Future[pb.BeginResponse]:
        """The same, later: several workers can begin at the same time."""

        async def until_decided() -> pb.BeginResponse:
            while (answer := await self._begin(round_)).order == pb.ORDER_WAIT:
                pass
            return answer

        return background.submit(until_decided())

    def begin_once(self, round_: int = 0) -> pb.BeginResponse:
        """The answer to one Begin, be it WAIT."""
        return background.run(self._begin(round_))

    async def _begin(self, round_: int) -> pb.BeginResponse:
        request = pb.BeginRequest(session=self.session, round=round_)
        answer: pb.BeginResponse = await self._stub.Begin(request, metadata=self._metadata, timeout=TIMEOUT_S)
        return answer

    def messages(
        self, share: pb.BeginResponse, tensors: Sequence[Encoded | None], *, round_: int = 0, **header: Any
    ) -> list[pb.ContributeRequest]:
        """A right contribution for a share: header, parts, commit; `header` replaces fields of the header."""
        values: dict[str, Any] = {
            "session": self.session,
            "round": round_,
            "assignment": share.assignment,
            "samples": sum(each.stop - each.start for each in share.ranges),
            "loss": 1.0,
            "learning_rates": [0.5],
            "train_seconds": 1.0,
            "absent": absent_positions(tensors),
            **header,
        }
        tally = Tally()
        parts = [pb.ContributeRequest(part=part) for part in write_parts(self.manifest, tensors, tally)]
        opening = pb.ContributeRequest(header=pb.ContributeHeader(**values))
        return [opening, *parts, pb.ContributeRequest(commit=tally.commit())]

    def contribute(
        self, share: pb.BeginResponse, tensors: Sequence[Encoded | None], *, round_: int = 0, **header: Any
    ) -> pb.ContributeResponse:
        """Sends such a contribution."""
        return self.send(self.messages(share, tensors, round_=round_, **header))

    def send(self, messages: Iterable[pb.ContributeRequest]) -> pb.ContributeResponse:
        """Sends any messages as a contribution."""
        answer: pb.ContributeResponse = self.stream("Contribute", messages)
        return answer

    def collect(self, round_: int = 0) -> tuple[pb.AggregateHeader, list[Encoded | None]]:
        """The aggregate of a round, once it is there."""
        return background.run(asyncio.wait_for(self._collect(round_), TIMEOUT_S))

    async def _collect(self, round_: int) -> tuple[pb.AggregateHeader, list[Encoded | None]]:
        header, reader = pb.AggregateHeader(), PartReader(self.manifest, absent=(), aggregate=True)
        request = pb.CollectRequest(session=self.session, round=round_)
        async for message in self._stub.Collect(request, metadata=self._metadata):
            match message.WhichOneof("kind"):
                case "header":
                    header = message.header
                    reader = PartReader(self.manifest, absent=header.absent, aggregate=True)
                case "part":
                    reader.add(message.part)
                case "commit":
                    return header, reader.finish(message.commit)
        raise AssertionError(f"the aggregate of round {round_} has no end")

    # Whatever.

    def state(self) -> pb.RunState:
        """The run at a glance."""
        answer: pb.GetRunResponse = self.unary("GetRun", pb.GetRunRequest())
        return answer.state

    def unary(self, name: str, request: Any) -> Any:
        """The answer to one request."""

        async def call() -> Any:
            return await getattr(self._stub, name)(request, metadata=self._metadata, timeout=TIMEOUT_S)

        return background.run(call())

    def stream(self, name: str, requests: Iterable[Any]) -> Any:
        """The answer to a stream of requests."""

        messages = list(requests)

        async def call() -> Any:
            method = getattr(self._stub, name)
            return await method(_each(messages), metadata=self._metadata, timeout=TIMEOUT_S)

        return _settled(call)

    def read_stream(self, name: str, request: Any) -> list[Any]:
        """All answers to one request."""

        async def call() -> list[Any]:
            return [each async for each in getattr(self._stub, name)(request, metadata=self._metadata)]

        return background.run(call())

    def stream_bytes(self, name: str, requests: Iterable[bytes]) -> bytes:
        """The same with messages that are bytes, right or wrong."""
        messages = list(requests)

        async def call() -> bytes:
            method = self.channel.stream_unary(f"/gradwire.v1.AggregationService/{name}")
            answer: bytes = await method(_each(messages), metadata=self._metadata, timeout=TIMEOUT_S)
            return answer

        answer: bytes = _settled(call)
        return answer

    def break_off(self, requests: Sequence[Any]) -> None:
        """Sends a part of a contribution, and cancels the call when all of it is on its way."""

        async def call() -> None:
            call = self._stub.Contribute(metadata=self._metadata, timeout=TIMEOUT_S)
            for request in requests:
                await call.write(request)
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, aio.AioRpcError):
                await call

        background.run(call())


async def _opened(address: str) -> aio.Channel:
    return open_channel(address)


async def _closed(channel: aio.Channel) -> None:
    await channel.close()


async def _each(requests: Iterable[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def _settled(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The answer of a call, repeated where gRPC's client stumbles over one that comes while it still writes."""
    while True:
        try:
            return background.run(call())
        except aio.AioRpcError as error:
            if error.details() != "Internal error from Core":
                raise
