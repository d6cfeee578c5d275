"""The service's calls as a worker makes them, one attempt each, on the background loop. Trying again is link.py's."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc import aio

from gradwire.codec import Encoded
from gradwire.errors import ProtocolError
from gradwire.manifest import Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1.aggregation_pb2_grpc import AggregationServiceStub
from gradwire.wire import calls
from gradwire.wire.channel import open_channel
from gradwire.wire.messages import PartReader
from gradwire.wire.schemas import entry_batches

if TYPE_CHECKING:  # the generated module has it for type checkers only
    from gradwire.v1.aggregation_pb2_grpc import AggregationServiceAsyncStub

T = TypeVar("T")
Say = Callable[[str], None]

UNARY_TIMEOUT_S = 30.0  # well above the few seconds for which Begin may wait
CORE_ERROR = "Internal error from Core"  # what gRPC calls a connection that breaks, or isn't there, while it writes
QUIET_S = 60.0  # a stream that brings nothing for so long, not even a note, is dead


@dataclass
class Collected:
    """An aggregate as it came, and how long that took; or, in `resend`, why this worker has to answer first."""

    header: pb.AggregateHeader
    tensors: Sequence[Encoded | None]
    wire_bytes: int
    wait_s: float
    download_s: float
    resend: str = ""


@dataclass
class Download:
    """A byte stream that can be taken up again where it broke off."""

    data: bytearray = field(default_factory=bytearray)
    header: pb.SnapshotHeader = field(default_factory=pb.SnapshotHeader)

    @property
    def intact(self) -> bool:
        """Whether what came is what the header announced."""
        return hashlib.sha256(self.data).digest() == self.header.sha256


class Client:
    """A channel to one aggregator. Every method raises aio.AioRpcError where its call fails."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address
        self.heard_s = -math.inf  # when a stream last brought something; by the monotonic clock
        self._metadata = calls.metadata(token)

    async def open(self) -> None:
        """Opens the channel; has to run on the loop that the calls will run on."""
        self._channel = open_channel(self.address)
        self._stub: AggregationServiceAsyncStub = AggregationServiceStub(self._channel)

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()

    async def get_run(self) -> pb.GetRunResponse:
        """The run's config and state."""
        return await self._stub.GetRun(pb.GetRunRequest(), metadata=self._metadata, timeout=UNARY_TIMEOUT_S)

    async def fetch_data(self, received: bytearray) -> None:
        """Appends the rest of the run's corpus to what was received."""
        request = pb.FetchDataRequest(offset=len(received))
        async for message in _lively(self._stub.FetchData(request, metadata=self._metadata)):
            self._heard()
            received.extend(message.data)

    async def join(self, header: pb.JoinHeader, manifest: Manifest) -> pb.JoinResponse:
        """Enters the run."""
        batches = (pb.ManifestEntries(entries=batch) for batch in entry_batches(manifest))
        messages = [pb.JoinRequest(header=header), *(pb.JoinRequest(entries=batch) for batch in batches)]
        return await self._send(self._stub.Join, messages)

    async def begin(self, session: bytes, round_: int) -> pb.BeginResponse:
        """What there is to do about a round."""
        request = pb.BeginRequest(session=session, round=round_)
        return await self._stub.Begin(request, metadata=self._metadata, timeout=UNARY_TIMEOUT_S)

    async def contribute(
        self, header: pb.ContributeHeader, rest: Sequence[pb.ContributeRequest]
    ) -> pb.ContributeResponse:
        """Hands in a contribution: its header, then parts and commit."""
        return await self._send(self._stub.Contribute, [pb.ContributeRequest(header=header), *rest])

    async def abstain(self, message: pb.Abstain) -> pb.ContributeResponse:
        """Gives a share back."""
        return await self._send(self._stub.Contribute, [pb.ContributeRequest(abstain=message)])

    async def collect(self, session: bytes, round_: int, manifest: Manifest, say: Say) -> Collected:
        """The aggregate of a round; `say` hears why there is none yet."""
        stream = self._stub.Collect(pb.CollectRequest(session=session, round=round_), metadata=self._metadata)
        asked = begun = time.monotonic()
        reader: PartReader | None = None
        header = pb.AggregateHeader()
        try:
            async for message in _lively(stream):
                self._heard()
                match message.WhichOneof("kind"):
                    case "note":
                        say(message.note)
                    case "resend" if reader is None:
                        waited = time.monotonic() - asked
                        return Collected(header, (), 0, wait_s=waited, download_s=0.0, resend=message.resend)
                    case "header" if reader is None:
                        begun, header = time.monotonic(), message.header
                        reader = PartReader(manifest, absent=header.absent, aggregate=True)
                    case "part" if reader is not None:
                        await asyncio.to_thread(reader.add, message.part)
                    case "commit" if reader is not None:
                        tensors = reader.finish(message.commit)
                        size, now = reader.tally.wire_bytes, time.monotonic()
                        return Collected(header, tensors, size, wait_s=begun - asked, download_s=now - begun)
                    case _:
                        raise ProtocolError(f"{self.address} sent an aggregate out of order")
        finally:
            stream.cancel()
        raise _interrupted(f"the aggregate of round {round_}")

    async def fetch_snapshot(self, session: bytes, download: Download, say: Say) -> None:
        """Goes on with a download of the newest snapshot; starts over where there is a newer one."""
        request = pb.FetchSnapshotRequest(session=session, offset=len(download.data), sha256=download.header.sha256)
        async for message in _lively(self._stub.FetchSnapshot(request, metadata=self._metadata)):
            self._heard()
            match message.WhichOneof("kind"):
                case "note":
                    say(message.note)
                case "header" if message.header.sha256 != download.header.sha256:
                    download.data.clear()
                    download.header.CopyFrom(message.header)
                case "data":
                    download.data.extend(message.data)
        if len(download.data) < download.header.size or not download.header.sha256:
            raise _interrupted("a snapshot")

    async def publish_snapshot(self, session: bytes, round_: int, data: bytes) -> pb.PublishSnapshotResponse:
        """Publishes safetensors bytes as the weights of a round."""
        header = pb.SnapshotHeader(round=round_, size=len(data), sha256=hashlib.sha256(data).digest())
        messages = [
            pb.PublishSnapshotRequest(session=session),
            pb.PublishSnapshotRequest(header=header),
            *(pb.PublishSnapshotRequest(data=piece) for piece in calls.slices(data)),
        ]
        return await self._send(self._stub.PublishSnapshot, messages)

    async def heartbeat(self, session: bytes, activity: str, timeout_s: float) -> None:
        """Renews the lease."""
        request = pb.HeartbeatRequest(session=session, activity=activity)
        await self._stub.Heartbeat(request, metadata=self._metadata, timeout=timeout_s)

    async def leave(self, request: pb.LeaveRequest, timeout_s: float) -> None:
        """Says goodbye."""
        await self._stub.Leave(request, metadata=self._metadata, timeout=timeout_s)

    def _heard(self) -> None:
        self.heard_s = time.monotonic()

    async def _send(self, method: aio.StreamUnaryMultiCallable[Any, T], messages: Sequence[Any]) -> T:
        call = method(metadata=self._metadata)
        try:
            for message in messages:
                async with asyncio.timeout(QUIET_S):
                    await call.write(message)
            await call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it has been answered already, well or not: the answer says
        except TimeoutError:
            call.cancel()
            raise _interrupted("an upload") from None
        try:
            async with asyncio.timeout(QUIET_S):
                return await call
        except TimeoutError:
            raise _interrupted("the wait for an answer") from None
        except aio.AioRpcError as error:
            if error.details() == CORE_ERROR:
                raise _interrupted("the connection") from error
            raise


async def _lively(stream: AsyncIterable[T]) -> AsyncIterator[T]:
    """The messages of a stream; one that stands still counts as one that failed."""
    messages = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise _interrupted("a stream") from None
        yield message


def _interrupted(what: str) -> aio.AioRpcError:
    """A stream that ended early counts as one that failed, and is tried again."""
    empty = aio.Metadata()
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details=f"{what} ended early")
