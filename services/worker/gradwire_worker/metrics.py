"""What Prometheus sees of a worker. Built once per registry, which is passed in."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gradwire.optim.residual import Residual
from gradwire.session import Session
from gradwire.snapshots import Traffic

PHASES: Final = ("data", "compute", "encode", "upload", "wait", "download", "apply")
_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """All series of a worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "gradwire_worker_phase_seconds",
            "Time spent in a phase of a step or round.",
            ["phase"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.round = Gauge("gradwire_worker_round", "Round whose weights this worker has.", registry=registry)
        self.tokens = Counter("gradwire_worker_tokens", "Tokens trained.", registry=registry)
        self.tokens_per_second = Gauge(
            "gradwire_worker_tokens_per_second",
            "Training speed over the last share, without waiting.",
            registry=registry,
        )
        self.bytes = Counter(
            "gradwire_worker_payload_bytes",
            "Payload that crossed the wire, as packed.",
            ["direction"],
            registry=registry,
        )
        self.residual_norm = Gauge(
            "gradwire_worker_residual_norm", "L2 norm of what compression left behind.", registry=registry
        )
        for phase in PHASES:
            self.seconds.labels(phase)
        for direction in ("upload", "download"):
            self.bytes.labels(direction)

        self._counted = Traffic()
        self._share_tokens = 0
        self._share_seconds = 0.0

    def phase(self, name: str, seconds: float) -> None:
        """Takes a measurement; what a session's `on_phase` calls."""
        self.seconds.labels(name).observe(seconds)
        if name == "compute":
            self._share_seconds += seconds

    def trained(self, *, tokens: int) -> None:
        """A batch was trained."""
        self.tokens.inc(tokens)
        self._share_tokens += tokens

    def round_over(self, session: Session, residual: Residual) -> None:
        """A round is over: brings up to date what changes by rounds."""
        self.round.set(session.round)
        self.residual_norm.set(residual.norm())
        if self._share_seconds:
            self.tokens_per_second.set(self._share_tokens / self._share_seconds)
        self._share_tokens, self._share_seconds = 0, 0.0
        now = replace(session.traffic)
        self.bytes.labels("upload").inc(now.upload_bytes - self._counted.upload_bytes)
        self.bytes.labels("download").inc(now.download_bytes - self._counted.download_bytes)
        self._counted = now
