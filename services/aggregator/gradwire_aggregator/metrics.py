"""What Prometheus sees of the aggregator. Built once per registry, which is passed in."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gradwire_aggregator.record import RoundRecord

DEVICES: Final = ("cuda", "mps", "cpu", "other")
_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """All series of an aggregator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.round = Gauge("gradwire_round", "Number of the current round.", registry=registry)
        self.rounds = Counter("gradwire_rounds", "Rounds that are over, by result.", ["result"], registry=registry)
        self.round_seconds = Histogram(
            "gradwire_round_seconds", "Time of a round, from open to aggregate.", registry=registry, buckets=_SECONDS
        )
        self.phase_seconds = Histogram(
            "gradwire_phase_seconds", "Time a round spent in a phase.", ["phase"], registry=registry, buckets=_SECONDS
        )
        self.contributions = Counter(
            "gradwire_contributions", "Contributions, by what became of them.", ["result"], registry=registry
        )
        self.bytes = Counter(
            "gradwire_payload_bytes",
            "Tensor payload that crossed the wire, as packed.",
            ["direction"],
            registry=registry,
        )
        self.workers = Gauge("gradwire_workers", "Workers whose lease runs.", ["device"], registry=registry)
        self.compression = Gauge(
            "gradwire_compression_ratio",
            "Bytes of the last round's contributions as float32, divided by the bytes that came.",
            registry=registry,
        )
        self.loss = Gauge("gradwire_loss", "Mean training loss of the last round.", registry=registry)
        self.held_out_loss = Gauge("gradwire_held_out_loss", "Last loss on held-out data.", registry=registry)
        self.samples = Counter("gradwire_samples", "Samples, by whether they counted.", ["result"], registry=registry)
        for result in ("counted", "void"):
            self.rounds.labels(result)
        for result in ("accepted", "duplicate", "late", "rejected", "abstained", "revoked"):
            self.contributions.labels(result)
        for direction in ("upload", "download"):
            self.bytes.labels(direction)
        for result in ("counted", "skipped"):
            self.samples.labels(result)

    def round_over(self, record: RoundRecord, *, dense_bytes: int) -> None:
        """A round ended. dense_bytes: of its contributions, had they come as float32."""
        self.rounds.labels("counted" if record.contributors else "void").inc()
        self.round.set(record.round + 1)
        self.round_seconds.observe(record.seconds)
        self.samples.labels("counted").inc(record.samples)
        if record.loss is not None:
            self.loss.set(record.loss)
        if record.held_out_loss is not None:
            self.held_out_loss.set(record.held_out_loss)
        if record.upload_bytes and dense_bytes:
            self.compression.set(dense_bytes / record.upload_bytes)

    def set_workers(self, devices: Iterable[str]) -> None:
        """Sets the number of workers by kind of device, from their descriptions."""
        kinds = Tally(_kind(each) for each in devices)
        for kind in DEVICES:
            self.workers.labels(kind).set(kinds[kind])


def _kind(description: str) -> str:
    word = description.split(" ", 1)[0]
    return word if word in DEVICES else "other"
