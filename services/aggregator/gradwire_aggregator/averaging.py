"""From a round's contributions to the messages of its aggregate. Runs in threads; knows neither clock nor state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradwire import codec
from gradwire.codec import Encoded
from gradwire.manifest import Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire.messages import Tally, absent_positions, write_parts
from gradwire_aggregator.record import RoundRecord
from gradwire_aggregator.rounds import Assignment


@dataclass(frozen=True)
class Received:
    """A contribution that arrived whole and right."""

    tensors: Sequence[Encoded | None]
    crc32: int
    samples: int
    wire_bytes: int
    train_seconds: float
    loss: float | None
    held_out_loss: float | None
    learning_rates: tuple[float, ...]


def mean(manifest: Manifest, received: Sequence[Received]) -> list[Encoded | None]:
    """The weighted mean of every tensor over the contributions, which are in ascending order of their workers.

    Raises NonFiniteGradient, naming the tensor, for a mean that overflows.
    """
    weights = [float(each.samples) for each in received]
    if not received:
        return [None] * len(manifest)
    return [
        codec.average(tensors, weights, scheme=entry.scheme, shape=entry.shape, name=entry.name)
        for entry, *tensors in zip(manifest, *(each.tensors for each in received), strict=True)
    ]


def aggregate_header(
    round_: int,
    chosen: Sequence[Assignment],
    received: Sequence[Received],
    tensors: Sequence[Encoded | None],
    joined_s: Mapping[str, float],
) -> pb.AggregateHeader:
    """What stands before an aggregate. `joined_s`: when each worker joined.

    The learning rates are those of the worker that has been in for longest: one that joined later may not have caught
    up with its own schedule.
    """
    pairs = list(zip(chosen, received, strict=True))
    oldest = min(pairs, key=lambda pair: joined_s[pair[0].worker], default=None)
    losses = [(each.loss, each.samples) for each in received if each.loss is not None]
    total = sum(samples for _, samples in losses)
    return pb.AggregateHeader(
        round=round_,
        contributors=[pb.Contributor(worker=each.worker, assignment=each.id, samples=each.samples) for each in chosen],
        loss=sum(loss * samples for loss, samples in losses) / total if total else None,
        learning_rates=oldest[1].learning_rates if oldest else (),
        absent=absent_positions(tensors),
    )


def round_record(
    header: pb.AggregateHeader, received: Sequence[Received], *, samples: int, download_bytes: int, seconds: float
) -> RoundRecord:
    """What is remembered of a round: `samples` of it counted, and it took `seconds`."""
    measured = [each.held_out_loss for each in received if each.held_out_loss is not None]
    return RoundRecord(
        round=header.round,
        seconds=seconds,
        contributors=len(received),
        samples=samples,
        upload_bytes=sum(each.wire_bytes for each in received),
        download_bytes=download_bytes,
        loss=header.loss if header.HasField("loss") else None,
        held_out_loss=measured[0] if measured else None,
    )


def serialize(
    manifest: Manifest, header: pb.AggregateHeader, tensors: Sequence[Encoded | None]
) -> tuple[list[bytes], int]:
    """The messages that every worker gets, and the bytes of their payload as packed."""
    tally = Tally()
    messages = [pb.CollectResponse(header=header).SerializeToString()]
    for part in write_parts(manifest, tensors, tally):
        messages.append(pb.CollectResponse(part=part).SerializeToString())
    messages.append(pb.CollectResponse(commit=tally.commit()).SerializeToString())
    return messages, tally.wire_bytes
