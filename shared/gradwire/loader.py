"""A share as batches of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import default_collate

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
