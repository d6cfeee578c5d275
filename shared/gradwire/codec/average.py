"""The weighted mean of a round's contributions to one tensor, without ever holding a dense copy per worker.

Sums run in float32 in the order of the workers given, so that the same contributions give the same bytes in
whatever order they arrived. "senders" is the normalization of DeMo (Peng et al., 2024) and SparseLoCo (Sarfi
et al., 2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gradwire.codec import indices, values
from gradwire.codec.bounds import check_whole
from gradwire.codec.scheme import Encoded, Form, Scheme, TopK, ValueKind
from gradwire.codec.tiles import Ints, Layout, layout_of
from gradwire.errors import ConfigError

DENSE_BLOCK: Final = 1 << 17  # elements of a dense tensor averaged at once


def average(
    contributions: Sequence[Encoded | None],
    weights: Sequence[float],
    *,
    scheme: Scheme,
    shape: Sequence[int],
    name: str = "the average",
) -> Encoded | None:
    """The mean of `contributions`, in ascending worker order, weighted by `weights`.

    contributions: each encoded under `scheme` from a tensor of `shape`. None is a worker without a gradient
        for this tensor: a zero with its weight under "contributors" and Dense, no sender under "senders".
    Returns the union of their coefficients in the shortest of GAP8, BITMAP and DENSE, in the values' own
    kind; None if all are None. One contribution alone decodes to itself, bit for bit.

    Raises MalformedTensor for a contribution that isn't one of `scheme` and `shape`, ConfigError for weights
    that are negative, not finite or sum to 0, NonFiniteGradient, naming `name`, for a mean that overflows.
    """
    if len(weights) != len(contributions):
        raise ConfigError(f"{name}: {len(weights)} weights for {len(contributions)} contributions")
    by_senders = isinstance(scheme, TopK) and scheme.normalization == "senders"
    counted = [
        (each, weight)
        for each, weight in zip(contributions, weights, strict=True)
        if each is not None or not by_senders
    ]
    present = [each for each in contributions if each is not None]
    if not present:
        return None
    for each in present:
        check_whole(each, scheme, shape, aggregate=False)
    total = _total([weight for _, weight in counted], name)
    shares = [float(np.float32(weight / total)) for each, weight in counted if each is not None]
    if isinstance(scheme, TopK) and present[0].form is not Form.DENSE:
        return _average_sparse(present, shares, by_senders, scheme, layout_of(scheme, shape), name)
    return _average_dense(present, shares, by_senders, scheme.values, math.prod(shape), name)


def _total(weights: Sequence[float], name: str) -> float:
    """Exactly rounded, so that it is the same in every Python version."""
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise ConfigError(f"{name}: weights {list(weights)}: each must be finite and not negative")
    total = math.fsum(weights)
    if total <= 0 or not math.isfinite(total):
        raise ConfigError(f"{name}: weights {list(weights)} sum to {total}: nothing to divide by")
    return total


def _average_dense(
    present: list[Encoded], shares: list[float], by_senders: bool, kind: ValueKind, numel: int, name: str
) -> Encoded:
    width = values.WIDTH[kind]
    data = [memoryview(each.values) for each in present]
    packed = []
    for low in range(0, numel, DENSE_BLOCK):
        cut = slice(low * width, (low + DENSE_BLOCK) * width)
        if by_senders and len(data) == 1:
            mean = values.unpack(data[0][cut], kind)
        else:
            mean = values.unpack(data[0][cut], kind).mul_(shares[0])
            for each, share in zip(data[1:], shares[1:], strict=True):
                mean.add_(values.unpack(each[cut], kind).mul_(share))
            if by_senders:
                mean.div_(_sum_float32(shares))
        packed.append(values.pack(mean, kind, name=name))
    return Encoded(Form.DENSE, b"".join(packed))


def _average_sparse(
    present: list[Encoded], shares: list[float], by_senders: bool, scheme: TopK, layout: Layout, name: str
) -> Encoded:
    kind, width = scheme.values, values.WIDTH[scheme.values]
    lengths, kept = layout.lengths(), layout.kept_counts()
    readers = [indices.blocks(each.form, each.indices, kept, lengths) for each in present]
    data = [memoryview(each.values) for each in present]
    keep_lone = by_senders and not (kind == "bf16" and all(_come_back(each, shares) for each in data))
    block = _Block(min(layout.numel, max(indices.BLOCK, layout.length)), shares, by_senders, keep_lone)
    packed: list[bytes] = []
    union: list[npt.NDArray[np.uint16]] = []
    counts: list[Ints] = []
    offset, alike = 0, (0, 0)  # blocks of as many chunks of the same length share their `starts`
    # The readers come first in the zip, so that each is run to its end, where it checks for left-over bytes.
    for *chosen, (low, high) in zip(*readers, indices.spans(lengths), strict=True):
        chunks, length = high - low, int(lengths[low])
        if (chunks, length) != alike:
            alike, starts = (chunks, length), indices.chunk_starts(kept[low:high], length)
        end = offset + len(starts) * width
        positions = [own + starts for own in chosen]
        sent = [values.unpack(each[offset:end], kind) for each in data]
        where, mean = block.mean(positions, sent)
        packed.append(values.pack(mean, kind, name=name))
        borders = np.searchsorted(where, np.arange(chunks + 1, dtype=np.int32) * length)
        counts.append(borders[1:] - borders[:-1])
        union.append((where - indices.chunk_starts(counts[-1], length)).astype(np.uint16))
        offset = end
    return _shortest(b"".join(packed), np.concatenate(union), np.concatenate(counts), layout, kind)


class _Block:
    """Accumulators for a block of chunks, in the cache: -0.0 where nothing was added, since -0.0 + x is x.

    keep_lone: whether a lone sender's value has to be kept aside to come out as it was.
    """

    def __init__(self, size: int, shares: list[float], by_senders: bool, keep_lone: bool) -> None:
        self._sums = torch.full((size,), -0.0)
        self._shares = shares
        # Shares that are all alike add up to what their number says; others are added up element by element.
        alike = len(set(shares)) == 1
        self._totals = np.cumsum([0.0, *shares], dtype=np.float32) if by_senders and alike else None
        self._weights = torch.zeros(size) if by_senders and not alike else None
        self._latest = torch.empty(size) if keep_lone else None

    def mean(self, positions: list[Ints], sent: list[torch.Tensor]) -> tuple[npt.NDArray[np.int32], torch.Tensor]:
        """(the sorted union of `positions`, the mean at each): positions are unique within one worker's."""
        for own, each, share in zip(positions, sent, self._shares, strict=True):
            at = torch.from_numpy(own)
            if self._latest is not None:
                self._latest.index_copy_(0, at, each)
            if self._weights is not None:
                self._weights.scatter_add_(0, at, torch.full_like(each, share))
            self._sums.scatter_add_(0, at, each.mul_(share))
        ordered = np.concatenate([own.astype(np.int32) for own in positions])
        ordered.sort()
        begins = np.ones(ordered.size, dtype=np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
        first = np.flatnonzero(begins)
        union = ordered[first]
        at = torch.from_numpy(union.astype(np.int64))
        mean = self._sums.index_select(0, at)
        self._sums.index_fill_(0, at, -0.0)
        if self._weights is not None:
            mean.div_(self._weights.index_select(0, at))
            self._weights.index_fill_(0, at, 0.0)
        senders = np.diff(first, append=ordered.size)
        if self._totals is not None:
            mean.div_(torch.from_numpy(self._totals[senders]))
        if self._latest is not None:
            mean = torch.where(torch.from_numpy(senders == 1), self._latest.index_select(0, at), mean)
        return union, mean


def _come_back(values: memoryview, shares: list[float]) -> bool:
    """Whether each bf16 value, times a share and divided by it in float32, rounds to itself in bf16.

    It does unless digits get lost, which they do where the product is subnormal.
    """
    least = min(shares)
    if not least:
        return False
    with np.errstate(over="ignore"):
        limit = (np.float32(2.0**-126 / least).view(np.uint32) >> 16) + 1
    magnitudes = np.frombuffer(values, dtype="<u2") & 0x7FFF
    return not ((magnitudes < limit) & (magnitudes > 0)).any()


def _shortest(packed: bytes, union: npt.NDArray[np.uint16], counts: Ints, layout: Layout, kind: ValueKind) -> Encoded:
    lengths = layout.lengths()
    gaps = indices.pack(Form.GAP8, union, counts, lengths)
    form = Form.GAP8 if len(gaps) <= indices.max_bytes(Form.BITMAP, counts, lengths) else Form.BITMAP
    index_bytes = gaps if form is Form.GAP8 else indices.pack(form, union, counts, lengths)
    sparse = Encoded(form, packed, index_bytes, counts.astype("<u2").tobytes())
    if layout.numel * values.WIDTH[kind] >= sparse.nbytes:
        return sparse
    bits = np.frombuffer(packed, dtype=np.int16 if kind == "bf16" else np.int32)
    flat = np.zeros(layout.numel, dtype=bits.dtype)
    flat[np.repeat(np.arange(layout.chunks) * layout.length, counts) + union] = bits
    return Encoded(Form.DENSE, layout.from_chunks(torch.from_numpy(flat)).numpy().tobytes())


def _sum_float32(shares: Sequence[float]) -> float:
    total = np.float32(0)
    for share in shares:
        total += np.float32(share)
    return float(total)
