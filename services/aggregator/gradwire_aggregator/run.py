"""The live run: the clock, the wake-ups and the averaging around the pure state machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from gradwire.config import RunConfig
from gradwire.corpus import Corpus
from gradwire.errors import GradwireError, ManifestMismatch, NonFiniteGradient, ProtocolError, RunEnded
from gradwire.manifest import Manifest
from gradwire_aggregator.averaging import Received, aggregate_header, mean, round_record, serialize
from gradwire_aggregator.ledger import IDENTITY, Ledger, Past, restore_plan
from gradwire_aggregator.metrics import Metrics
from gradwire_aggregator.plan import Plan
from gradwire_aggregator.record import HISTORY, Record, RoundRecord
from gradwire_aggregator.roster import Member, Roster
from gradwire_aggregator.rounds import Assignment, Decision, Outcome, Phase, Policy, Rounds, Verdict
from gradwire_aggregator.snapshots import Snapshots
from gradwire_aggregator.store import Snapshot, Store

log = logging.getLogger("gradwire.aggregator")

T = TypeVar("T")

# Unpacking and averaging are made of short steps, and between them threads wait for the interpreter lock: a second one
# makes both slower (benchmarks/README.md).
THREADS: Final = 1


class Run:
    """Everything an aggregator knows, and what it does about it. Lives on one event loop."""

    def __init__(
        self, config: RunConfig, corpus: Corpus | None, store: Store, ledger: Ledger, metrics: Metrics
    ) -> None:
        self.config = config
        self.corpus = corpus
        self.store = store
        self.ledger = ledger
        self.metrics = metrics
        self.record = Record()
        self.roster = Roster(config.round.lease_s)
        self.rounds = Rounds(
            Policy(
                rounds=config.rounds,
                global_batch=config.batch.global_batch,
                min_workers=config.round.min_workers,
                deadline_s=config.round.deadline_s,
                gather_s=config.round.gather_s,
                by_speed=config.batch.shares == "throughput",
            ),
            Plan(inner_batch=config.batch.inner_batch, attempts=config.round.share_attempts),
        )
        self.manifest: Manifest | None = None
        self._corpus_sha256 = bytes.fromhex(corpus.fingerprint) if corpus is not None else b""
        identity = config.model_dump(include=set(IDENTITY), mode="json")
        self.id = ledger.open_run(identity, self._corpus_sha256, secrets.token_bytes(16))
        self.data_sha256 = self._corpus_sha256
        self.ended = asyncio.Event()
        self._received: dict[int, Received] = {}
        self._changed = asyncio.Event()
        self._poked = asyncio.Event()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="average")
        self.snapshots = Snapshots(config.round.snapshot_every, self.roster, store)
        self._evaluating = -1  # the round for which somebody was asked to measure
        self._phase_since = time.monotonic()
        self._skipped = 0
        self._go_on(ledger.past(HISTORY), ledger.next_life())

    def _go_on(self, past: Past, life: int) -> None:
        """Takes the run up where the ledger says that it stopped."""
        known = self.ledger.manifest()
        if known is not None:
            self.manifest, self.data_sha256 = known
        if past.plan is not None:
            restore_plan(self.rounds.plan, past.plan)
        self._skipped = self.rounds.plan.samples_skipped
        self.rounds.go_on(past.rounds, life=life, expected=past.workers)
        self.record.rounds.extend(past.history)
        self.record.upload_bytes = sum(each.upload_bytes for each in past.history)
        self.metrics.round.set(past.rounds)
        if self.rounds.phase is Phase.ENDED:
            self.ended.set()
        if life > 1:
            self._event(f"started again, at round {past.rounds}")

    # Time.

    async def drive(self) -> None:
        """Makes every transition when it is due, until cancelled."""
        while True:
            self._poked.clear()
            now = time.monotonic()
            for member in self.roster.expire(now):
                self._gone(member, f"not heard of for {self.config.round.lease_s:g} s")
            before, assigned = self.rounds.phase, len(self.rounds.assignments)
            decision = self.rounds.decide(now, self._speeds())
            self._note_phase(before, decision)
            if len(self.rounds.assignments) != assigned:
                self.announce()
            if decision.phase is Phase.AVERAGING:
                await self._average()
                continue
            waits = [t for t in (decision.wake_s, self.roster.next_expiry()) if t is not None]
            timeout = max(0.0, min(waits) - time.monotonic()) + 0.001 if waits else None
            # Not wait_for, which can swallow a cancellation in Python 3.11.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._poked.wait()

    def poke(self) -> None:
        """Something happened that may bring a transition."""
        self._poked.set()
        self.announce()

    def announce(self) -> None:
        """Something happened that those who wait may want to see."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> None:
        """Waits for the next announcement, or the time."""
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs a function in the thread that computes. Files are for `asyncio.to_thread`."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def wait_until_over(self) -> None:
        """Waits until all rounds are done and every worker has left, or its lease has ended."""
        await self.ended.wait()
        while self.roster.present:
            await self.changed(self.config.round.lease_s)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def reason(self) -> str:
        """Why the run stands where it does, in words, as of now."""
        if self.manifest is None:
            return "waiting for the first worker"
        if self.store.snapshot is None:
            return f"waiting for {self.snapshots.publisher} to publish its first weights"
        return self.rounds.explain(time.monotonic(), self._speeds()).reason

    def _speeds(self) -> dict[str, float | None]:
        return {name: member.samples_per_second for name, member in self.roster.present.items()}

    # Who is in.

    def join(self, name: str, *, incarnation: bytes, device: str, manifest: Manifest, data: bytes) -> Member:
        """Enters a worker. Raises ManifestMismatch unless it trains what the run trains, RunEnded after the end."""
        if self.rounds.phase is Phase.ENDED:
            raise RunEnded(f"run {self.config.name!r} is over: all {self.config.rounds} rounds are done")
        if self.store.snapshot is None and not self.roster.present.keys() - {name}:
            self.manifest, self.data_sha256 = None, self._corpus_sha256  # nothing hangs on what was said before
        if self.manifest is not None:
            manifest.require_same(self.manifest)
        if self.data_sha256 and data and data != self.data_sha256:
            raise ManifestMismatch(
                f"data: SHA-256 {data.hex()[:16]}... here, {self.data_sha256.hex()[:16]}... in the run; all workers "
                "have to train on the same data"
            )
        if self.manifest is None:
            self.manifest = manifest
        self.data_sha256 = self.data_sha256 or data
        member, replaced = self.roster.join(
            name, incarnation=incarnation, session=secrets.token_bytes(16), device=device, now=time.monotonic()
        )
        self.ledger.add_worker(name, incarnation, device)
        self.rounds.is_gone(name, "its worker was started anew" if replaced else "its worker joined anew")
        self._event(f"{name} joined on {device}" + (", in place of an older process" if replaced else ""))
        self._count_workers()
        self.poke()
        return member

    def hear(self, session: bytes) -> Member:
        """The member of a session, its lease renewed. Raises SessionExpired, Superseded."""
        return self.roster.hear(session, time.monotonic())

    def leave(self, member: Member, reason: str) -> None:
        """A worker says goodbye."""
        self.roster.leave(member)
        self._gone(member, f"left: {reason}")

    def _gone(self, member: Member, reason: str) -> None:
        self.rounds.is_gone(member.name, reason)
        member.activity = reason
        self._event(f"{member.name}: {reason}")
        self._count_workers()
        self.poke()

    def _count_workers(self) -> None:
        self.metrics.set_workers(member.device for member in self.roster.present.values())

    # Snapshots.

    def took_snapshot(self, member: Member, snapshot: Snapshot) -> None:
        """A snapshot arrived."""
        newest = self.store.snapshot
        if newest is None or snapshot.round > newest.round:
            if newest is None and self.manifest is not None:
                self.ledger.set_manifest(self.manifest, self.data_sha256)
            self.ledger.add_snapshot(snapshot)
            self.store.put_snapshot(snapshot)
            self._event(f"{member.name} published the weights of round {snapshot.round}")
            self.announce()

    # One round.

    def assignment_for(self, member: Member, round_: int) -> Assignment | None:
        """What a worker that is ready for a round has to train; None where it has to wait, or to collect."""
        if round_ > self.rounds.number:
            raise ProtocolError(f"round {round_} is asked for, the current one is {self.rounds.number}")
        if round_ < self.rounds.number or self.rounds.answered(member.name) or self.store.snapshot is None:
            return None
        assignment = self.rounds.pending(member.name)
        if assignment is None and member.name not in self.rounds.ready:
            self.rounds.is_ready(member.name)
            self.poke()
        return assignment

    def not_ready(self, session: bytes) -> None:
        """A worker that waited for work hung up; its lease goes on."""
        for member in self.roster.present.values():
            if member.session == session:
                self.rounds.ready.discard(member.name)

    def wants_evaluation(self, round_: int) -> bool:
        """Whether the worker that asks is to measure the held-out loss of these weights. Asks one worker a round."""
        training = self.config.training
        if training is None or self._evaluating >= round_:
            return False
        if round_ % training.evaluate_every and round_ < self.config.rounds:
            return False
        self._evaluating = round_
        return True

    def measured_last(self, held_out_loss: float) -> None:
        """The loss of the final weights on held-out data."""
        self.record.final_held_out_loss = held_out_loss
        self.metrics.held_out_loss.set(held_out_loss)
        self._event(f"held-out loss of the final weights: {held_out_loss:.4f}")

    def receive(self, member: Member, assignment: int, round_: int, received: Received) -> tuple[Verdict, str]:
        """A contribution arrived whole."""
        verdict, reason = self.rounds.commit(member.name, round_, assignment, received.crc32)
        self.metrics.contributions.labels(verdict.value).inc()
        if verdict is Verdict.ACCEPTED:
            self._received[assignment] = received
            worker = self.record.workers[member.name]
            worker.accepted += 1
            worker.loss = received.loss
            worker.samples += received.samples
            self.roster.measured(member.name, samples=received.samples, seconds=received.train_seconds)
            self.poke()
        elif verdict is not Verdict.DUPLICATE:
            self._refused(member.name, f"{verdict.value}: {reason}")
        return verdict, reason

    def refuse(self, member: Member, assignment: int, round_: int, outcome: Outcome, reason: str) -> None:
        """A contribution was rejected for its content, or its worker abstained."""
        self.rounds.refuse(member.name, round_, assignment, outcome, reason)
        self.metrics.contributions.labels(outcome.value).inc()
        self._refused(member.name, f"round {round_}: {outcome.value}: {reason}")
        self.poke()

    def late(self, member: Member, reason: str, *, samples: int, seconds: float) -> None:
        """A contribution came when its round or assignment was over. Its worker's speed is known all the same."""
        self.roster.measured(member.name, samples=samples, seconds=seconds)
        self.metrics.contributions.labels("late").inc()
        self._refused(member.name, f"late: {reason}")

    def uploaded(self, member: Member, size: int) -> None:
        """Payload bytes came from a worker."""
        self.record.workers[member.name].upload_bytes += size
        self.record.upload_bytes += size
        self.metrics.bytes.labels("upload").inc(size)

    def downloaded(self, member: Member, size: int) -> None:
        """Payload bytes went to a worker."""
        self.record.workers[member.name].download_bytes += size
        self.metrics.bytes.labels("download").inc(size)

    def _refused(self, worker: str, reason: str) -> None:
        self.record.refused(worker, reason)
        self._event(f"{worker}: {reason}")

    async def _average(self) -> None:
        number = self.rounds.number
        chosen = self.rounds.contributions
        received = [self._received[each.id] for each in chosen]
        for lost in self.rounds.assignments.values():
            if lost.outcome is Outcome.REVOKED:
                self.metrics.contributions.labels("revoked").inc()
                self._refused(lost.worker, f"round {number}: {lost.reason}")
                elapsed = self.rounds.closed_s - self.rounds.opened_s
                self.roster.at_most(lost.worker, samples=lost.samples, seconds=elapsed)
        manifest = self.manifest or Manifest("", ())
        counted = True
        try:
            tensors = await self.in_thread(mean, manifest, received)
        except NonFiniteGradient as error:
            counted, chosen, received = False, [], []
            tensors = [None] * len(manifest)
            self._event(f"round {number} is void: {error}")
        joined_s = {name: member.joined_s for name, member in self.roster.members.items()}
        header = aggregate_header(number, chosen, received, tensors, joined_s)
        messages, size = await self.in_thread(serialize, manifest, header, tensors)
        plan, samples = self.rounds.outcome(counted=counted)
        seconds = time.monotonic() - self.rounds.opened_s
        record = round_record(header, received, samples=samples, download_bytes=size, seconds=seconds)
        try:
            kept = await asyncio.to_thread(self.store.write_aggregate, number, messages)
            self.ledger.add_round(record, chosen, plan, kept)
        except (OSError, sqlite3.Error) as error:
            raise GradwireError(
                f"round {number} can't be written down ({error}): the run stops before it. Nothing else is lost: make "
                "room, and start the aggregator again with the same --data"
            ) from error
        self.store.keep_aggregate(number, messages)
        self.rounds.finish(counted=counted)
        self._received = {}
        self._finished(record)
        self._phase_since = time.monotonic()
        self.announce()
        if self.rounds.phase is Phase.ENDED:
            self._event(f"all {self.config.rounds} rounds are done")
            self.ended.set()

    def _finished(self, record: RoundRecord) -> None:
        self.record.rounds.append(record)
        elements = sum(entry.elements for entry in self.manifest or ())
        self.metrics.round_over(record, dense_bytes=4 * elements * record.contributors)
        self.metrics.phase_seconds.labels("averaging").observe(time.monotonic() - self.rounds.closed_s)
        skipped = self.rounds.plan.samples_skipped
        self.metrics.samples.labels("skipped").inc(skipped - self._skipped)
        self._skipped = skipped
        log.info(
            "round %d %s: %d contributions, %d samples, loss %s, %.2f s, %d bytes up, %d bytes down each",
            record.round,
            "counted" if record.contributors else "void",
            record.contributors,
            record.samples,
            f"{record.loss:.4f}" if record.loss is not None else "unknown",
            record.seconds,
            record.upload_bytes,
            record.download_bytes,
        )

    def _note_phase(self, before: Phase, decision: Decision) -> None:
        if decision.phase is not before:
            now = time.monotonic()
            if before is not Phase.AVERAGING:  # that one is measured where it ends
                self.metrics.phase_seconds.labels(before.value).observe(now - self._phase_since)
            self._phase_since = now
            log.debug("round %d: %s", self.rounds.number, decision.reason)
            self.announce()

    def _event(self, text: str) -> None:
        self.record.event(text)
        log.info(text)
