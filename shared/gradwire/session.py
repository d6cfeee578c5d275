"""A worker's side of a run: join, begin, contribute, collect, heartbeat.

Every call is safe to repeat, so whatever fails for a passing reason is simply tried again (link.py). A lease that ended
is renewed by joining again with the weights at hand, and a worker that fell too far behind loads the newest snapshot.
All methods are for one thread, the one that trains; gRPC runs on the background loop.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from google.protobuf import json_format

from gradwire import cache, device
from gradwire.client import Collected
from gradwire.config import RunConfig, parse_config
from gradwire.errors import GradwireError, ManifestMismatch, ProtocolError, RoundGone, RunEnded
from gradwire.exchange import Aggregate, Contribution, Replica, Sent, Share
from gradwire.link import Link
from gradwire.loader import Batch, Dataset, Steps, share_batches
from gradwire.retry import Retry
from gradwire.snapshots import Snapshots, Traffic
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire import calls
from gradwire.wire.channel import PROTOCOL
from gradwire.wire.messages import Tally, absent_positions, write_parts

log = logging.getLogger("gradwire.session")


def connect(
    address: str,
    *,
    run: str | None = None,
    token: str | None = None,
    worker: str | None = None,
    data_sha256: bytes = b"",
    give_up_after_s: float | None = None,
    on_phase: Callable[[str, float], None] | None = None,
) -> Session:
    """Connects to an aggregator and reads the run's config; joining happens when an optimizer is made.

    Args:
        address: HOST:PORT of the aggregator. If nobody answers there yet, waits for it.
        run: name of the run that is meant; None: whichever it is.
        token: the run's bearer token; default: the environment's GRADWIRE_TOKEN.
        worker: this worker's name, unique in the run; a process that joins under a name replaces the one before.
            Default: the host's name and a random suffix.
        data_sha256: SHA-256 of the data trained on; workers with different ones can't be in one run.
        give_up_after_s: how long to try to reach the aggregator; default 600 s at first, then as the run's config
            says.
        on_phase: is told how many seconds went into each of data, encode, upload, wait, download and apply.

    Raises Unavailable if nobody answers, ManifestMismatch for another run or protocol, Unauthenticated.
    """
    name = worker or f"{platform.node() or 'worker'}-{secrets.token_hex(2)}"
    session = Session(address, name, token or calls.token_from_environment(), data_sha256, on_phase)
    try:
        session.open(run, give_up_after_s)
    except BaseException:
        session.leave("could not connect")
        raise
    return session


class Session:
    """One worker's connection to one run. Made by `connect`; a context manager that leaves at its end."""

    def __init__(
        self,
        address: str,
        worker: str,
        token: str | None,
        data_sha256: bytes,
        on_phase: Callable[[str, float], None] | None,
    ) -> None:
        self.address = address
        self.worker = worker
        self.traffic = Traffic()
        self.round = 0
        self.evaluate_last = False  # whether the run wants to hear the final weights' loss on held-out data
        self.held_out_loss: float | None = None
        self._data_sha256 = data_sha256
        self._link = Link(address, token, self._join)
        self._on_phase = on_phase
        self._incarnation = secrets.token_bytes(16)
        self.run_id = b""  # empty before the join; an aggregator that was started anew has another
        self._snapshots = Snapshots(self._link, self.traffic)
        self._replica: Replica | None = None
        self._share: Share | None = None
        self._sent: Sent | None = None
        self._share_started = 0.0
        self._steps = Steps()
        self.consistent = True  # False while an aggregate is being applied

    # For the training script.

    def open(self, run: str | None, give_up_after_s: float | None) -> None:
        """Opens the channel and reads the run's config."""
        if give_up_after_s is not None:
            self._link.retry = Retry(give_up_after_s)
        answer = self._link.call("GetRun", self._link.client.get_run)
        if answer.protocol != PROTOCOL:
            raise ManifestMismatch(
                f"{self.address} speaks protocol version {answer.protocol}, this worker {PROTOCOL}: install the same "
                "version of gradwire on both machines"
            )
        if run is not None and run != answer.run:
            raise ManifestMismatch(f"run: {run!r} here, {answer.run!r} at {self.address}")
        self.run = answer.run
        self.config: RunConfig = parse_config(
            json_format.MessageToDict(answer.config), source=f"the config sent by {self.address}"
        )
        self.data = answer.data if answer.HasField("data") else None
        if give_up_after_s is None:
            self._link.retry = Retry(self.config.round.give_up_after_s)

    def join(self, replica: Replica) -> None:
        """Enters the run with a replica and brings it to the state of the others, which go on meanwhile."""
        if self._replica is not None:
            raise GradwireError("this session has its optimizer already; connect once more for another")
        self._replica = replica
        self._join()

    def loader(
        self, dataset: Dataset, batch_size: int, *, collate: Callable[[list[Any]], Any] | None = None
    ) -> Iterator[Any]:
        """Batches of this worker's share, round by round until the run ends.

        Args:
            dataset: has `len` and integer indexing, the same on all workers. Which sample comes when is a function of
                the run's seed alone.
            batch_size: samples a batch; a share's last batch may be smaller.
            collate: makes a batch of a list of samples; default: PyTorch's.

        A round in which this worker has no share is collected and applied in here. Raises GradwireError if the
        optimizer's `step` was not called for each batch.
        """
        while (share := self.next_share()) is not None:
            batches = share_batches(share, dataset, batch_size, seed=self.config.seed, collate=collate)
            yield from self._steps.through(batches, lambda: self.phase("data"))

    @property
    def batch(self) -> Batch:
        """The batch that the loader gave out last. Raises GradwireError outside the loader."""
        return self._steps.batch

    def take_batch(self) -> Batch:
        """The batch that the loader gave out last, for an optimizer's step; raises GradwireError the second time."""
        return self._steps.take()

    def report(self, held_out_loss: float) -> None:
        """Reports the loss of the weights as they are on held-out data; sent with the contribution, or when leaving.

        Called before the share is trained; the time it took is not counted as training.
        """
        self.held_out_loss = held_out_loss
        self._share_started = time.monotonic()

    @property
    def share(self) -> Share | None:
        """The share that is being trained."""
        return self._share

    def next_share(self) -> Share | None:
        """Goes on with the next round until there is a share to train; None when the run is over."""
        replica = self._joined()
        while True:
            with self.phase("wait"):
                answer = self._link.call("Begin", lambda: self._link.client.begin(self._link.session, self.round))
            if answer.publish_snapshot:
                self._snapshots.publish_beside(replica, self.round)
            match answer.order:
                case pb.ORDER_TRAIN:
                    share = Share.given(self.round, answer)
                    if self._sent is not None and self._sent.serves(share):
                        log.info("sending the contribution to round %d once more", self.round)
                        self._share = share
                        self._send(self._sent, replica)
                        continue
                    if self._share is not None:  # it came late, and the round is still open: from its start again
                        self._apply(replica, Aggregate.nothing(self.round, len(replica.manifest)))
                    self._share = share
                    self._share_started = time.monotonic()
                    self._link.activity = f"training round {self.round}"
                    return self._share
                case pb.ORDER_COLLECT:
                    self._collect_and_apply(replica)
                case pb.ORDER_END:
                    self.evaluate_last = answer.evaluate
                    self._link.activity = "done"
                    return None
                case pb.ORDER_WAIT:
                    self._link.say(f"waiting for round {self.round}: {answer.reason}")
                case _:
                    raise ProtocolError(f"{self.address} gave the unknown order {answer.order}")

    def exchange(self, contribution: Contribution) -> None:
        """Hands in the contribution for the present share, then collects and applies the round's aggregate."""
        replica, share = self._joined(), self._require_share()
        header = pb.ContributeHeader(
            round=share.round,
            samples=share.samples,
            loss=contribution.loss,
            held_out_loss=self.held_out_loss,
            learning_rates=contribution.learning_rates,
            absent=absent_positions(contribution.tensors),
            train_seconds=time.monotonic() - self._share_started,
        )
        tally = Tally()
        with self.phase("encode"):
            messages = [
                pb.ContributeRequest(part=part) for part in write_parts(replica.manifest, contribution.tensors, tally)
            ]
        messages.append(pb.ContributeRequest(commit=tally.commit()))
        self._sent = Sent(share, header, messages, tally.wire_bytes)
        self._send(self._sent, replica)

    def _send(self, sent: Sent, replica: Replica) -> None:
        share = self._require_share()
        self._link.activity = f"uploading round {share.round}"

        def attempt() -> Awaitable[pb.ContributeResponse]:
            # Either may be another than at the last try.
            sent.header.session, sent.header.assignment = self._link.session, share.assignment
            return self._link.client.contribute(sent.header, sent.messages)

        with self.phase("upload"):
            verdict = self._link.call("Contribute", attempt)
        self.traffic.upload_bytes += sent.wire_bytes
        self._settle(verdict, replica)

    def abstain(self, reason: str) -> None:
        """Gives the present share back, with the reason, then collects and applies the round's aggregate."""
        replica, share = self._joined(), self._require_share()
        log.warning("no contribution to round %d: %s", share.round, reason)

        def attempt() -> Awaitable[pb.ContributeResponse]:
            message = pb.Abstain(
                session=self._link.session, round=share.round, assignment=share.assignment, reason=reason[:1000]
            )
            return self._link.client.abstain(message)

        self._settle(self._link.call("Contribute", attempt), replica)

    def fetch_data(self) -> bytes:
        """The run's text corpus, from the cache where it was fetched before.

        Raises GradwireError if it isn't what the run's fingerprint says.
        """
        if self.data is None:
            raise GradwireError(f"run {self.run!r} has no corpus: its workers bring their own data")
        return cache.fetched(self._link, self.data)

    def leave(self, reason: str = "finished", *, checkpoint: str = "") -> None:
        """Says goodbye, so that the share goes back at once, and closes the connection. Tries once, for 3 s."""
        goodbye = pb.LeaveRequest(reason=reason[:1000], held_out_loss=self.held_out_loss, checkpoint=checkpoint[:1000])
        self._link.close(goodbye, self._snapshots.publishing)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.leave("finished" if error is None else f"stopped: {type(error).__name__}")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs inside and tells `on_phase`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._spent(name, time.monotonic() - start)

    def _spent(self, name: str, seconds: float) -> None:
        if self._on_phase is not None:
            self._on_phase(name, seconds)

    # One round.

    def _settle(self, verdict: pb.ContributeResponse, replica: Replica) -> None:
        if verdict.verdict in (pb.VERDICT_LATE, pb.VERDICT_REJECTED):
            name = pb.Verdict.Name(verdict.verdict).removeprefix("VERDICT_")
            log.warning("contribution to round %d is %s: %s", self.round, name, verdict.reason)
        self.held_out_loss = None
        # A late one goes back to Begin: the round may still be open, and wait for this very worker to train a returned
        # share; or it may be over with this contribution in it, if only the answer was late. The aggregate will tell.
        if verdict.verdict != pb.VERDICT_LATE:
            self._collect_and_apply(replica)

    def _collect_and_apply(self, replica: Replica) -> None:
        self._link.activity = f"collecting round {self.round}"
        number = self.round

        def attempt() -> Awaitable[Collected]:
            return self._link.client.collect(
                self._link.session, number, replica.manifest, lambda note: self._link.say(f"round {number}: {note}")
            )

        try:
            collected = self._link.call("Collect", attempt)
        except RoundGone as error:
            log.warning("%s; loading the newest snapshot", error)
            self._load_snapshot(replica)
        else:
            self._spent("wait", collected.wait_s)
            if collected.resend:  # back to Begin, with what was sent at hand
                log.info(collected.resend)
                return
            self.traffic.download_bytes += collected.wire_bytes
            self._spent("download", collected.download_s)
            self._apply(replica, self._aggregate(collected))
            self.round = number + 1
        self._share = None

    def _apply(self, replica: Replica, aggregate: Aggregate) -> None:
        self.consistent, self._sent = False, None
        with self.phase("apply"):
            replica.apply(aggregate)
            device.synchronize(replica.device)
        self.consistent = True

    def _aggregate(self, collected: Collected) -> Aggregate:
        header = collected.header
        contributors = tuple((c.worker, c.assignment, c.samples) for c in header.contributors)
        own = (self.worker, self._share.assignment) if self._share is not None else None
        return Aggregate(
            round=header.round,
            contributors=contributors,
            counted=any((worker, assignment) == own for worker, assignment, _ in contributors),
            tensors=collected.tensors,
            loss=header.loss if header.HasField("loss") else None,
            learning_rates=tuple(header.learning_rates),
        )

    # Joining and state.

    def _join(self) -> None:
        replica = self._joined()
        with self.phase("wait"):
            answer = self._link.call("Join", lambda: self._send_join(replica))
        if self.run_id and answer.run_id != self.run_id:
            raise RunEnded(
                f"the aggregator at {self.address} was started anew, without the --data of this run; start this worker "
                "again to join the new one"
            )
        self._link.session, self.run_id = answer.session, answer.run_id
        self._link.keep_alive(answer.heartbeat_seconds)
        match answer.start_from:
            case pb.START_FROM_PUBLISH:
                self._snapshots.publish(replica, self.round)
            case pb.START_FROM_SNAPSHOT:
                self._load_snapshot(replica)
        log.info("joined run %s at %s as %s, at round %d", self.run, self.address, self.worker, self.round)

    def _send_join(self, replica: Replica) -> Awaitable[pb.JoinResponse]:
        manifest = replica.manifest
        header = pb.JoinHeader(
            protocol=PROTOCOL,
            run=self.run,
            worker=self.worker,
            incarnation=self._incarnation,
            device=device.describe(replica.device),
            data_sha256=self._data_sha256,
            method=manifest.method,
            entries=len(manifest),
            manifest_sha256=manifest.fingerprint,
            round=self.round if self.run_id else None,
            run_id=self.run_id,
        )
        return self._link.client.join(header, manifest)

    def _load_snapshot(self, replica: Replica) -> None:
        with self.phase("download"):
            self.round = self._snapshots.load(replica)
        self._share = self._sent = None

    def _joined(self) -> Replica:
        if self._replica is None:
            raise GradwireError("make the optimizer first, with this session: that is what joins the run")
        return self._replica

    def _require_share(self) -> Share:
        if self._share is None:
            raise GradwireError("there is no share to contribute to; take batches from session.loader(...)")
        return self._share
