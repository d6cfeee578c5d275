"""Which sample comes when: a seeded permutation of the dataset per epoch, the same on every machine.

Sample numbers run from 0 without end; number n is the (n mod length)-th of epoch n // length. It depends on
(seed, number) alone, so it doesn't matter who is in the run, or how a round's samples are cut into shares.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwire.errors import ConfigError


@dataclass(frozen=True)
class SampleOrder:
    """The order of a run's samples.

    Args:
        seed: 0 to 2**64 - 1.
        length: number of samples in the dataset.

    Raises:
        ConfigError: an empty dataset, or a seed out of range.
    """

    seed: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"the dataset has {self.length} samples: a run needs at least one")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed = {self.seed}: must be within 0 to 2**64 - 1")

    def index(self, sample: int) -> int:
        """The dataset index, `0 <= index < length`, of sample number `sample`, 0 or more."""
        return int(self.indices(sample, sample + 1)[0])

    __getitem__ = index
    __iter__ = None  # it has no end, so the iteration that __getitem__ implies would never return

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """The dataset indices of sample numbers `start` to `stop`, half-open: int64 `[stop - start]`."""
        if not 0 <= start <= stop:
            raise IndexError(f"sample numbers [{start}, {stop}): must be 0 <= start <= stop")
        taken = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            epoch, offset = divmod(position, self.length)
            count = min(self.length - offset, stop - position)
            order = _permutation(self.seed, self.length, epoch)
            taken[position - start : position - start + count] = order[offset : offset + count]
            position += count
        return taken


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, length: int, epoch: int) -> NDArray[np.int64]:
    """One epoch's order, int64 `[length]`, read-only since it is shared.

    numpy promises the raw stream of a bit generator for ever, but not what `Generator.permutation` makes of
    it. The sort is stable so that even two equal draws leave one answer.
    """
    draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(length)
    order = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order
