"""A run at a glance, as the message that `gradwire status` and the page show."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from gradwire.v1 import aggregation_pb2 as pb
from gradwire_aggregator.roster import Member
from gradwire_aggregator.rounds import Phase
from gradwire_aggregator.run import Run

MAX_WORKERS: Final = 500
MAX_WORDS: Final = 128  # of 4 bytes at most

_PHASES: Final = {
    Phase.WAITING: pb.PHASE_WAITING,
    Phase.OPEN: pb.PHASE_OPEN,
    Phase.AVERAGING: pb.PHASE_AVERAGING,
    Phase.ENDED: pb.PHASE_ENDED,
}


def run_state(run: Run, *, metrics_address: str) -> pb.RunState:
    """The run as it stands now."""
    plan, record = run.rounds.plan, run.record
    return pb.RunState(
        round=run.rounds.number,
        rounds=run.config.rounds,
        phase=_PHASES[run.rounds.phase],
        reason=run.reason(),
        workers=[_worker(run, member) for member in _shown(run.roster.members.values())],
        history=[
            pb.RoundRecord(
                round=each.round,
                loss=each.loss,
                held_out_loss=each.held_out_loss,
                seconds=each.seconds,
                contributors=each.contributors,
                samples=each.samples,
                upload_bytes=each.upload_bytes,
                download_bytes=each.download_bytes,
            )
            for each in record.rounds
        ],
        events=[pb.Event(time=_timestamp(when), text=text) for when, text in record.events],
        samples_counted=plan.counted.total,
        samples_skipped=plan.samples_skipped,
        parameters=run.manifest.parameters if run.manifest is not None else 0,
        metrics_address=metrics_address,
        checkpoint=record.checkpoint,
        upload_bytes=record.upload_bytes,
        final_held_out_loss=record.final_held_out_loss,
    )


def _shown(members: Iterable[Member]) -> list[Member]:
    """By name, those that are in and those heard of last, so that the message stays within its bound."""
    latest = sorted(members, key=lambda member: (member.present, member.heard_s), reverse=True)[:MAX_WORKERS]
    return sorted(latest, key=lambda member: member.name)


def _worker(run: Run, member: Member) -> pb.WorkerState:
    record = run.record.workers[member.name]
    pending = run.rounds.pending(member.name)
    return pb.WorkerState(
        name=member.name,
        device=member.device[:MAX_WORDS],
        present=member.present,
        activity=member.activity[:MAX_WORDS],
        samples_per_second=member.samples_per_second or 0.0,
        share=pending.samples if pending is not None else 0,
        idle_seconds=max(0.0, time.monotonic() - member.heard_s),
        upload_bytes=record.upload_bytes,
        download_bytes=record.download_bytes,
        accepted=record.accepted,
        refused=record.refused,
        last_refusal=record.last_refusal[:MAX_WORDS],
        loss=record.loss,
        samples=record.samples,
    )


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
