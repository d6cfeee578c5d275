"""Protobuf in, domain calls, protobuf out: nothing is decided here."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator
from typing import Final

from google.protobuf import struct_pb2

from gradwire.errors import ConfigError, MalformedTensor, ManifestMismatch, ProtocolError, SessionExpired
from gradwire.manifest import MAX_TENSORS, Entry, Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.v1.tensors_pb2 import Part
from gradwire.wire.calls import slices
from gradwire.wire.channel import PAYLOAD_BYTES, PROTOCOL
from gradwire.wire.messages import PartReader
from gradwire.wire.schemas import entry_from_message
from gradwire_aggregator.averaging import Received
from gradwire_aggregator.roster import Member
from gradwire_aggregator.rounds import Outcome, Phase, Verdict
from gradwire_aggregator.run import Run
from gradwire_aggregator.status import run_state

# How long Begin, Collect and FetchSnapshot wait before they say why they wait.
PATIENCE_S: Final = 3.0
WATCH_EVERY_S: Final = 0.25
MAX_WORDS: Final = 1024
MAX_GROUPS: Final = 4096
MAX_RATE: Final = 1e6
# Parts of a contribution that are unpacked at once: to change threads costs as much as to unpack a small one.
BATCH_BYTES: Final = 128 * 1024

_VERDICTS: Final = {
    Verdict.ACCEPTED: pb.VERDICT_ACCEPTED,
    Verdict.DUPLICATE: pb.VERDICT_DUPLICATE,
    Verdict.LATE: pb.VERDICT_LATE,
    Verdict.REJECTED: pb.VERDICT_REJECTED,
}


class Servicer:
    """The AggregationService of one run. Streams of requests are async iterators of messages."""

    def __init__(self, run: Run, *, metrics_address: str) -> None:
        self._run = run
        self._metrics_address = metrics_address

    async def GetRun(self, request: pb.GetRunRequest) -> pb.GetRunResponse:
        run = self._run
        config = struct_pb2.Struct()
        config.update(run.config.model_dump(exclude={"server"}, exclude_none=True))
        data = None
        if run.corpus is not None:
            data = pb.DataInfo(sha256=bytes.fromhex(run.corpus.fingerprint), size=len(run.corpus.data))
        return pb.GetRunResponse(protocol=PROTOCOL, run=run.config.name, config=config, data=data, state=self._state())

    async def WatchRun(self, request: pb.WatchRunRequest) -> AsyncIterator[pb.WatchRunResponse]:
        while True:
            yield pb.WatchRunResponse(state=self._state())
            if self._run.ended.is_set() and not self._run.roster.present:
                return
            await self._run.changed(PATIENCE_S)
            await asyncio.sleep(WATCH_EVERY_S)

    async def FetchData(self, request: pb.FetchDataRequest) -> AsyncIterator[pb.FetchDataResponse]:
        corpus = self._run.corpus
        if corpus is None:
            raise ProtocolError("this run has no corpus: its workers bring their own data")
        if request.offset > len(corpus.data):
            raise ProtocolError(f"the corpus has {len(corpus.data)} bytes, none from {request.offset} on")
        for piece in slices(corpus.data, request.offset):
            yield pb.FetchDataResponse(data=piece)

    async def Join(self, requests: AsyncIterator[pb.JoinRequest]) -> pb.JoinResponse:
        run = self._run
        header, manifest = await _read_join(requests, run.config.name)
        name = header.worker
        member = run.join(
            name,
            incarnation=header.incarnation,
            device=_words(header.device, 128),
            manifest=manifest,
            data=header.data_sha256,
        )
        if run.snapshots.must_publish(member):
            start = pb.START_FROM_PUBLISH
        elif header.HasField("round") and header.run_id == run.id:
            start = pb.START_FROM_OWN
        else:
            start = pb.START_FROM_SNAPSHOT
        return pb.JoinResponse(
            session=member.session,
            lease_seconds=run.config.round.lease_s,
            heartbeat_seconds=run.config.round.heartbeat_s,
            start_from=start,
            run_id=run.id,
        )

    async def Begin(self, request: pb.BeginRequest) -> pb.BeginResponse:
        try:
            return await self._begin(request)
        except asyncio.CancelledError:  # the worker hung up: a share would be lost on it
            self._run.not_ready(request.session)
            raise

    async def _begin(self, request: pb.BeginRequest) -> pb.BeginResponse:
        run = self._run
        deadline = time.monotonic() + PATIENCE_S
        while True:
            member = run.hear(request.session)
            if run.rounds.phase is Phase.ENDED and request.round == run.rounds.number:
                return pb.BeginResponse(
                    order=pb.ORDER_END, reason=run.reason(), evaluate=run.wants_evaluation(request.round)
                )
            assignment = run.assignment_for(member, request.round)
            if assignment is not None:
                policy = run.rounds.policy
                left = run.rounds.opened_s + policy.deadline_s - time.monotonic()
                return pb.BeginResponse(
                    order=pb.ORDER_TRAIN,
                    assignment=assignment.id,
                    ranges=[pb.SampleRange(start=start, stop=stop) for start, stop in assignment.ranges],
                    deadline_seconds=max(0.0, left),
                    publish_snapshot=run.snapshots.wants(member, run.rounds.number),
                    evaluate=run.wants_evaluation(request.round),
                )
            over = request.round < run.rounds.number or run.rounds.phase is Phase.AVERAGING
            if over or run.rounds.answered(member.name):
                return pb.BeginResponse(order=pb.ORDER_COLLECT, reason=run.reason())
            left = deadline - time.monotonic()
            if left <= 0:
                return pb.BeginResponse(order=pb.ORDER_WAIT, reason=run.reason())
            await run.changed(left)

    async def Contribute(self, requests: AsyncIterator[pb.ContributeRequest]) -> pb.ContributeResponse:
        first = await anext(requests, None)
        kind = first.WhichOneof("kind") if first is not None else None
        if first is not None and kind == "abstain":
            return self._abstain(first.abstain)
        if first is None or kind != "header":
            raise ProtocolError("a contribution starts with its header")
        run, header = self._run, first.header
        member = run.hear(header.session)
        verdict, reason = run.rounds.standing(member.name, header.round, header.assignment)
        if verdict is Verdict.LATE:
            run.late(member, reason, samples=header.samples, seconds=header.train_seconds)
            return _answer(verdict, reason)
        try:
            received = await self._read_contribution(member, header, requests)
        except MalformedTensor as error:
            run.refuse(member, header.assignment, header.round, Outcome.REJECTED, str(error))
            return _answer(Verdict.REJECTED, str(error))
        if isinstance(received, str):
            run.late(member, received, samples=header.samples, seconds=header.train_seconds)
            return _answer(Verdict.LATE, received)
        return _answer(*run.receive(member, header.assignment, header.round, received))

    async def Collect(self, request: pb.CollectRequest) -> AsyncIterator[bytes]:
        run = self._run
        while request.round >= run.rounds.number:
            member = run.hear(request.session)
            if request.round > run.rounds.number:
                raise ProtocolError(f"round {request.round} is asked for, the current one is {run.rounds.number}")
            if run.rounds.lacks(member.name):
                reason = f"round {request.round} has nothing of {member.name}: the aggregator was started again"
                yield pb.CollectResponse(resend=reason).SerializeToString()
                return
            note = pb.CollectResponse(note=run.reason())
            await run.changed(PATIENCE_S)
            if request.round >= run.rounds.number:
                yield note.SerializeToString()
        member = run.hear(request.session)
        size = 0
        for message in await asyncio.to_thread(run.store.aggregate, request.round):
            yield message
            size += len(message)
        run.downloaded(member, size)

    async def Heartbeat(self, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        self._run.hear(request.session).activity = _words(request.activity, 128)
        return pb.HeartbeatResponse()

    async def PublishSnapshot(self, requests: AsyncIterator[pb.PublishSnapshotRequest]) -> pb.PublishSnapshotResponse:
        run = self._run
        first, second = await anext(requests, None), await anext(requests, None)
        if first is None or second is None or second.WhichOneof("kind") != "header":
            raise ProtocolError("a snapshot starts with the session and a header")
        member, header = run.hear(first.session), second.header
        run.snapshots.check(member, header.round, header.size, current=run.rounds.number, manifest=run.manifest)
        writer = run.store.receive_snapshot(header.round, header.size, header.sha256)
        try:
            async for request in requests:
                await asyncio.to_thread(writer.write, request.data)
                run.hear(first.session)
            snapshot = await asyncio.to_thread(writer.finish)
        except BaseException:
            writer.abandon()
            raise
        run.took_snapshot(member, snapshot)
        return pb.PublishSnapshotResponse()

    async def FetchSnapshot(self, request: pb.FetchSnapshotRequest) -> AsyncIterator[pb.FetchSnapshotResponse]:
        run = self._run
        member = run.hear(request.session)
        while (snapshot := run.store.snapshot) is None:
            note = run.reason()
            await run.changed(PATIENCE_S)
            run.hear(request.session)
            if run.store.snapshot is None:
                yield pb.FetchSnapshotResponse(note=note)
            if run.snapshots.lacks_publisher():
                raise SessionExpired("the worker that was to publish the first weights has left; join again")
        offset = request.offset if request.sha256 == snapshot.sha256 else 0
        if offset > snapshot.size:
            raise ProtocolError(f"the snapshot has {snapshot.size} bytes, none from {offset} on")
        yield pb.FetchSnapshotResponse(
            header=pb.SnapshotHeader(round=snapshot.round, size=snapshot.size, sha256=snapshot.sha256)
        )
        with snapshot.path.open("rb") as file:
            file.seek(offset)
            while piece := await asyncio.to_thread(file.read, PAYLOAD_BYTES):
                yield pb.FetchSnapshotResponse(data=piece)
                run.hear(request.session)
        run.downloaded(member, snapshot.size - offset)

    async def Leave(self, request: pb.LeaveRequest) -> pb.LeaveResponse:
        run = self._run
        member = run.hear(request.session)
        if request.checkpoint:
            run.record.checkpoint = _words(request.checkpoint)
        if request.HasField("held_out_loss") and math.isfinite(request.held_out_loss):
            run.measured_last(request.held_out_loss)
        run.leave(member, _words(request.reason))
        return pb.LeaveResponse()

    def _state(self) -> pb.RunState:
        return run_state(self._run, metrics_address=self._metrics_address)

    def _abstain(self, message: pb.Abstain) -> pb.ContributeResponse:
        run = self._run
        member = run.hear(message.session)
        verdict, reason = run.rounds.standing(member.name, message.round, message.assignment)
        if verdict is Verdict.ACCEPTED:
            run.refuse(member, message.assignment, message.round, Outcome.ABSTAINED, _words(message.reason))
            return _answer(Verdict.ACCEPTED, "")
        return _answer(verdict, reason)

    async def _read_contribution(
        self, member: Member, header: pb.ContributeHeader, requests: AsyncIterator[pb.ContributeRequest]
    ) -> Received | str:
        """The contribution, or why it is late. Raises MalformedTensor for content that is wrong."""
        run = self._run
        if run.manifest is None:
            raise ProtocolError("nobody has joined yet")
        pending = run.rounds.assignments[header.assignment]
        if header.samples != pending.samples:
            raise MalformedTensor(f"the header says {header.samples} samples, the assignment has {pending.samples}")
        _check_numbers(header)
        reader = PartReader(run.manifest, absent=header.absent, aggregate=False)
        parts: list[Part] = []
        waiting_bytes = 0
        async for request in requests:
            run.hear(header.session)
            match request.WhichOneof("kind"):
                case "part":
                    parts.append(request.part)
                    waiting_bytes += request.ByteSize()
                    if waiting_bytes >= BATCH_BYTES:
                        await self._take(member, reader, parts)
                        parts, waiting_bytes = [], 0
                case "commit":
                    await self._take(member, reader, parts)
                    tensors = reader.finish(request.commit)
                    return Received(
                        tensors=tensors,
                        crc32=reader.tally.crc32,
                        samples=header.samples,
                        wire_bytes=reader.tally.wire_bytes,
                        train_seconds=header.train_seconds,
                        loss=header.loss if header.HasField("loss") else None,
                        held_out_loss=header.held_out_loss if header.HasField("held_out_loss") else None,
                        learning_rates=tuple(header.learning_rates),
                    )
                case other:
                    raise MalformedTensor(f"a {other or 'message of an unknown kind'} amid the parts")
            verdict, reason = run.rounds.standing(member.name, header.round, header.assignment)
            if verdict is Verdict.LATE:
                return reason
        raise ProtocolError("the contribution ended without a commit: it counts as never sent")

    async def _take(self, member: Member, reader: PartReader, parts: list[Part]) -> None:
        before = reader.tally.wire_bytes
        await self._run.in_thread(_add_all, reader, parts)
        self._run.uploaded(member, reader.tally.wire_bytes - before)


def _add_all(reader: PartReader, parts: list[Part]) -> None:
    for part in parts:
        reader.add(part)


def _check_numbers(header: pb.ContributeHeader) -> None:
    """Raises MalformedTensor unless every number of a header is finite: they would become everybody's."""
    numbers = {"loss": header.loss, "held_out_loss": header.held_out_loss, "train_seconds": header.train_seconds}
    numbers |= {f"learning_rates[{n}]": rate for n, rate in enumerate(header.learning_rates)}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise MalformedTensor(f"the header says {name} = {value}, which is not finite")
    rates = header.learning_rates
    if len(rates) > MAX_GROUPS or any(not 0 <= rate <= MAX_RATE for rate in rates):
        raise MalformedTensor(f"the header has {len(rates)} learning rates: at most {MAX_GROUPS} of 0 to {MAX_RATE:g}")


async def _read_join(requests: AsyncIterator[pb.JoinRequest], run: str) -> tuple[pb.JoinHeader, Manifest]:
    first = await anext(requests, None)
    if first is None or first.WhichOneof("kind") != "header":
        raise ProtocolError("a join starts with its header")
    header = first.header
    if header.protocol != PROTOCOL:
        raise ManifestMismatch(
            f"protocol version: {header.protocol} here, {PROTOCOL} at the aggregator; install the same version of "
            "gradwire on both machines"
        )
    if header.run and header.run != run:
        raise ManifestMismatch(f"run: {header.run!r} here, {run!r} at the aggregator")
    if not 0 < len(header.worker.encode()) <= 128 or not header.worker.isprintable():
        raise ProtocolError("a worker's name has 1 to 128 bytes, all printable")
    if header.entries > MAX_TENSORS:
        raise ProtocolError(f"a manifest has at most {MAX_TENSORS} tensors, this one has {header.entries}")
    if len(header.incarnation) != 16:
        raise ProtocolError("an incarnation has 16 bytes")
    if len(header.data_sha256) not in (0, hashlib.sha256().digest_size):
        raise ProtocolError("a data fingerprint has 32 bytes")
    entries: list[Entry] = []
    async for request in requests:
        entries.extend(entry_from_message(message) for message in request.entries.entries)
        if len(entries) > header.entries:
            break
    if len(entries) != header.entries:
        raise ProtocolError(f"the manifest has {len(entries)} entries, its header announced {header.entries}")
    try:
        manifest = Manifest(header.method[:128], tuple(entries))
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    if manifest.fingerprint != header.manifest_sha256:
        raise ProtocolError("the manifest's fingerprint is not that of its entries")
    return header, manifest


def _words(text: str, limit: int = MAX_WORDS) -> str:
    """What a peer says, fit for a log line and a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


def _answer(verdict: Verdict, reason: str) -> pb.ContributeResponse:
    return pb.ContributeResponse(verdict=_VERDICTS[verdict], reason=reason)
