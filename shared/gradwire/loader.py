"""A share as batches of samples, and the steps that are taken on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import default_collate

from gradwire.errors import GradwireError
from gradwire.exchange import Share
from gradwire.samples import SampleOrder


class Dataset(Protocol):
    """What has a length and gives the sample at an index, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Batch:
    """A batch's place in its share: every batch but the last has `batch_size` samples."""

    index: int
    batches: int
    samples: int
    batch_size: int
    share_samples: int

    @property
    def last(self) -> bool:
        return self.index == self.batches - 1


def share_batches(
    share: Share,
    dataset: Dataset,
    batch_size: int,
    *,
    seed: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[tuple[Batch, Any]]:
    """The samples of a share in order, in batches."""
    order = SampleOrder(seed, len(dataset))
    indices = np.concatenate([order.indices(start, stop) for start, stop in share.ranges])
    starts = range(0, len(indices), batch_size)
    for number, start in enumerate(starts):
        chosen = indices[start : start + batch_size].tolist()
        batch = Batch(number, len(starts), len(chosen), batch_size, len(indices))
        yield batch, (collate or default_collate)([dataset[index] for index in chosen])


class Steps:
    """The batch that is being trained, and whether its step was taken: each batch gets exactly one."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._taken = False

    @property
    def batch(self) -> Batch:
        """The batch that was given out last. Raises GradwireError where there is none."""
        if self._batch is None:
            raise GradwireError("optimizer.step() takes batches of session.loader(...), one call for each")
        return self._batch

    def take(self) -> Batch:
        """The same, for its step. Raises GradwireError the second time."""
        batch = self.batch
        if self._taken:
            raise GradwireError("optimizer.step() was called twice for one batch of session.loader")
        self._taken = True
        return batch

    def through(
        self, batches: Iterator[tuple[Batch, Any]], timed: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[Any]:
        """Gives out the samples of a share's batches; `timed` measures what it takes to get them.

        Raises GradwireError if the step of a batch was left out.
        """
        while True:
            with timed():
                item = next(batches, None)
            if item is None:
                self._batch = None
                return
            self._batch, samples = item
            self._taken = False
            yield samples
            if not self._taken:
                raise GradwireError(
                    "optimizer.step() was not called for the last batch: every batch of session.loader needs it"
                )
