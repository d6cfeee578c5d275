"""What one round's exchange consists of, as a worker sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from gradwire.codec import Encoded
from gradwire.manifest import Manifest
from gradwire.v1 import aggregation_pb2 as pb


@dataclass(frozen=True)
class Share:
    """What this worker trains in a round: half-open ranges of sample numbers, in order."""

    round: int
    assignment: int
    ranges: tuple[tuple[int, int], ...]
    evaluate: bool  # whether to measure the loss on held-out data before training

    @classmethod
    def given(cls, round_: int, answer: pb.BeginResponse) -> Share:
        """The share in the answer to Begin."""
        ranges = tuple((each.start, each.stop) for each in answer.ranges)
        return cls(round_, answer.assignment, ranges, answer.evaluate)

    @property
    def samples(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class Contribution:
    """What a worker hands in for its share: one tensor per manifest entry, None where there was no gradient."""

    tensors: Sequence[Encoded | None]
    loss: float | None = None
    learning_rates: Sequence[float] = ()


@dataclass(frozen=True)
class Sent:
    """A contribution as it was sent, kept until the round is over: an aggregator that died asks for it again."""

    share: Share
    header: pb.ContributeHeader
    messages: Sequence[pb.ContributeRequest]
    wire_bytes: int

    def serves(self, share: Share) -> bool:
        """Whether it is what training a share would come to: the same samples of the same round."""
        return (self.share.round, self.share.ranges) == (share.round, share.ranges)


@dataclass(frozen=True)
class Aggregate:
    """The weighted mean of a round's contributions.

    contributors: (worker, assignment, samples) by ascending worker; empty where the round is void.
    counted: whether this worker's contribution of the round is in it. Nothing else decides what becomes of its
    residual.
    """

    round: int
    contributors: tuple[tuple[str, int, int], ...]
    counted: bool
    tensors: Sequence[Encoded | None] = field(repr=False)
    loss: float | None = None
    learning_rates: tuple[float, ...] = ()

    @classmethod
    def nothing(cls, round_: int, tensors: int) -> Aggregate:
        """What leaves the weights of a round as they are, and takes back what was trained on them."""
        return cls(round_, contributors=(), counted=False, tensors=[None] * tensors)

    @property
    def void(self) -> bool:
        """Whether nothing counted: the weights stay as they are."""
        return not self.contributors


class Replica(Protocol):
    """One worker's copy of what a run trains. The session keeps it in step; a method implements it."""

    @property
    def manifest(self) -> Manifest:
        """The tensors it exchanges."""

    @property
    def device(self) -> torch.device:
        """Where it trains."""

    def apply(self, aggregate: Aggregate) -> None:
        """Turns weights r into weights r + 1. The same code serves rounds that are replayed."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Weights, buffers and the optimizer state that is the same on all workers; may share memory with them."""

    def load_snapshot(self, state: dict[str, torch.Tensor]) -> None:
        """Takes over the state of another replica; this worker's residual starts from zero.

        Raises ManifestMismatch where tensors are missing or have other shapes.
        """
