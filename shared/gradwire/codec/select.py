"""Canonical selection: the same coefficients chosen, whatever the device.

Of each chunk the entries of largest magnitude; a tie goes to the lower index; in ascending index order. Runs
on the tensor's own device, with nothing but float32, int64 and bool, on contiguous tensors of at most two
dimensions, since some devices (MPS) get others wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from gradwire.codec.tiles import Layout
from gradwire.device import to_host

BLOCK: Final = 1 << 22  # coefficients ranked at once: bounds the temporary memory on the device


def top_k(flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept entries of `flat`, a finite, contiguous 1-D float32 tensor in chunk order, on its device.

    Returns (indices int64, values float32), both 1-D on the host: chunk after chunk, indices relative to
    their chunk and ascending.
    """
    indices, values = [], []
    for chunks, kept in _blocks(flat, layout):
        chosen = _largest(chunks, kept)
        indices.append(to_host(chosen).view(-1))
        values.append(to_host(chunks.gather(1, chosen)).view(-1))
    return torch.cat(indices), torch.cat(values)


def _blocks(flat: torch.Tensor, layout: Layout) -> Iterator[tuple[torch.Tensor, int]]:
    """(contiguous chunks [n, length], entries to keep of each); the shorter last chunk by itself."""
    whole = layout.chunks - (layout.last_length != layout.length)
    step = max(1, BLOCK // layout.length)
    for first in range(0, whole, step):
        count = min(step, whole - first)
        block = flat[first * layout.length : (first + count) * layout.length]
        yield block.contiguous().view(count, layout.length), layout.kept
    if whole < layout.chunks:
        yield flat[whole * layout.length :].contiguous().view(1, -1), layout.last_kept


def _largest(chunks: torch.Tensor, kept: int) -> torch.Tensor:
    """Ascending int64 indices [n, kept] of the largest magnitudes in each row of `chunks` [n, length]."""
    count, length = chunks.shape
    if kept == length:
        return torch.arange(length, device=chunks.device).repeat(count, 1)
    magnitudes = chunks.abs()
    top = magnitudes.topk(kept, dim=1, sorted=False)
    chosen = top.indices.contiguous()
    smallest_kept = top.values.contiguous().amin(dim=1)
    # Once the kept ones are struck out, an equal magnitude among the rest makes topk's choice arbitrary.
    largest_left = magnitudes.scatter_(1, chosen, -1.0).amax(dim=1)
    tied = (largest_left == smallest_kept).nonzero().view(-1)
    if tied.numel():
        rows = chunks.index_select(0, tied).abs()
        chosen = chosen.index_copy(0, tied, _break_ties(rows, smallest_kept.index_select(0, tied), kept))
    return chosen.contiguous().sort(dim=1).values


def _break_ties(magnitudes: torch.Tensor, threshold: torch.Tensor, kept: int) -> torch.Tensor:
    """Indices [n, kept] of the entries above each row's threshold, then of the lowest of those equal to it.

    Ranks by a score that no two of them share, so that no sort has to be stable; exact in float32, since
    twice the longest chunk is far below 2^24.
    """
    length = magnitudes.shape[1]
    earliness = torch.arange(length, 0, -1, device=magnitudes.device, dtype=torch.float32)
    earliness = earliness.expand_as(magnitudes).contiguous()
    edge = threshold.view(-1, 1)
    score = torch.where(magnitudes == edge, earliness, torch.zeros_like(magnitudes))
    score = torch.where(magnitudes > edge, earliness + length, score)
    return score.contiguous().topk(kept, dim=1, sorted=False).indices.contiguous()
