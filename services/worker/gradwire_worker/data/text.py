"""Text as samples: windows of bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradwire.errors import ConfigError


class TextDataset(Dataset[Tensor]):
    """Sample i is the `context + 1` bytes from `i * context` on: `context` inputs and their targets.

    Windows share one byte with the next, so every byte but the first is a target once an epoch.

    Args:
        data: the text; viewed, never copied.
        context: window length in bytes, without the one to predict.

    Raises:
        ConfigError: the text is shorter than one window.
    """

    def __init__(self, data: bytes, *, context: int) -> None:
        if context < 1:
            raise ConfigError(f"context = {context}: must be 1 or more")
        if len(data) < context + 1:
            raise ConfigError(
                f"the text has {len(data)} bytes: one sample with context = {context} needs {context + 1}"
            )
        self.context = context
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        """int64 `[context + 1]`, values 0 to 255. Raises IndexError outside `0 <= index < len`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a text of {len(self)} samples")
        start = index * self.context
        window = self._bytes[start : start + self.context + 1]
        return torch.from_numpy(window.astype(np.int64))

    def held_out_batches(self, batch: int, max_batches: int) -> Iterator[Tensor]:
        """At most `max_batches` batches, int64 `[batch, context + 1]`, evenly spread over the text.

        They are the same every time, and of one size, so that the mean of their losses is the mean over the
        samples; a text of fewer than `batch` samples is one smaller batch.
        """
        batch = min(batch, len(self))
        count = min(max_batches, len(self) // batch)
        chosen = [number * len(self) // (count * batch) for number in range(count * batch)]
        for start in range(0, len(chosen), batch):
            yield torch.stack([self[index] for index in chosen[start : start + batch]])
