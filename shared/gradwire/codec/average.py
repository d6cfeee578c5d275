"""The weighted mean of a round's contributions to one tensor, without ever holding a dense copy per worker.

Sums run in float32 in the order of the workers given, so that the same contributions give the same bytes in
whatever order they arrived. "senders" is the normalization of DeMo (Peng et al., 2024) and SparseLoCo (Sarfi
et al., 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire.codec import dct, indices, values
from gradwire.codec.bounds import check_whole
from gradwire.codec.indices import Places
from gradwire.codec.scheme import Encoded, Form, Scheme, TopK, WholeKind, value_kind, whole_kind
from gradwire.codec.tiles import Ints, Layout, layout_of
from gradwire.codec.values import all_finite
from gradwire.errors import ConfigError, NonFiniteGradient

DENSE_BLOCK: Final = 1 << 17  # elements of a dense tensor averaged at once
_NO_COUNTS: Final = np.empty(0, np.int64)


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
    kind (signs as bf16), or, of sparse tensors under update "sign", form SIGN: the sign of every weight, an exact
    0 as +1, and nothing of a chunk whose coefficients are all 0. None if all are None. One contribution alone
    decodes to itself, bit for bit.

    Raises MalformedTensor for a contribution that isn't one of `scheme` and `shape`, ConfigError for weights
    that are not above 0 and finite, NonFiniteGradient, naming `name`, for a mean that overflows.
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
    sparse = isinstance(scheme, TopK) and present[0].form is not Form.DENSE
    senders = [_Sender(each, scheme, shape, share) for each, share in zip(present, shares, strict=True)]
    if isinstance(scheme, TopK) and scheme.clip == "median":
        _clip_to_median(senders)
    kind = whole_kind(scheme)
    if not sparse or not isinstance(scheme, TopK):
        return _average_dense(senders, by_senders, kind, name)
    layout = layout_of(scheme, shape)
    # A lone sender's value may go through its share and back only where the result is rounded.
    keep_lone = by_senders and (scheme.update == "sign" or not all(each.comes_back(min(shares)) for each in senders))
    means = _means(senders, by_senders, keep_lone, layout)
    return _signs(means, layout, name) if scheme.update == "sign" else _union(means, layout, kind, name)


def _total(weights: Sequence[float], name: str) -> float:
    """Exactly rounded, so that it is the same in every Python version."""
    if any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise ConfigError(f"{name}: weights {list(weights)}: each must be finite and above 0")
    total = math.fsum(weights)
    if not math.isfinite(total):
        raise ConfigError(f"{name}: weights {list(weights)} sum to {total}")
    return total


class _Sender:
    """One worker's contribution to a tensor, read in blocks; its `clip` scales all of its values."""

    def __init__(self, encoded: Encoded, scheme: Scheme, shape: Sequence[int], share: float) -> None:
        self.encoded = encoded
        self.share = share
        self.clip = 1.0
        self.kind = value_kind(scheme, encoded.form, aggregate=False)
        self._layout = layout_of(scheme, shape) if isinstance(scheme, TopK) and encoded.form is not Form.DENSE else None

    def blocks(self) -> Iterator[torch.Tensor]:
        """Its values, 1-D float32, block by block: of `DENSE_BLOCK` elements, or of `indices.spans`."""
        data, scales = memoryview(self.encoded.values), memoryview(self.encoded.scales)
        if self._layout is None:
            step = DENSE_BLOCK * values.WIDTH[self.kind]
            for start in range(0, len(data), step):
                yield self._clipped(values.read(data[start : start + step], b"", self.kind, _NO_COUNTS))
            return
        each = int(values.chunk_bytes(self.kind, np.array([self._layout.kept]))[0])  # all but the last have as many
        for low, high in indices.spans(self._layout.lengths()):
            kept = self._layout.kept_counts(low, high - low)
            own_values = data[low * each : high * each]
            own_scales = scales[values.SCALE_BYTES * low : values.SCALE_BYTES * high]
            yield self._clipped(values.read(own_values, own_scales, self.kind, kept))

    def _clipped(self, block: torch.Tensor) -> torch.Tensor:
        return block if self.clip == 1.0 else block.mul_(self.clip)

    def comes_back(self, least: float) -> bool:
        """Whether each of its values, times its share and divided by it in float32, rounds to itself as bf16.

        It does unless digits get lost, which they do where the product is subnormal.
        """
        if self.kind == "fp32" or self.clip != 1.0 or not least:
            return False
        with np.errstate(over="ignore"):
            limit = (np.float32(2.0**-126 / least).view(np.uint32) >> 16) + 1
        sizes = self.encoded.scales if self.kind == "sign" else self.encoded.values
        magnitudes = np.frombuffer(sizes, dtype="<u2") & 0x7FFF
        return not ((magnitudes < limit) & (magnitudes > 0)).any()


def _clip_to_median(senders: list[_Sender]) -> None:
    norms = [math.sqrt(sum(float(block.double().square().sum()) for block in each.blocks())) for each in senders]
    median = sorted(norms)[(len(norms) - 1) // 2]
    for each, norm in zip(senders, norms, strict=True):
        if norm > median:
            each.clip = float(np.float32(median / norm))


def _average_dense(senders: list[_Sender], by_senders: bool, kind: WholeKind, name: str) -> Encoded:
    packed = []
    total = _sum_float32([each.share for each in senders])
    for first, *others in zip(*(each.blocks() for each in senders), strict=True):
        mean = first
        if not by_senders or others:
            mean.mul_(senders[0].share)
        for each, sender in zip(others, senders[1:], strict=True):
            mean.add_(each.mul_(sender.share))
        if by_senders and others:
            mean.div_(total)
        packed.append(values.pack(mean, kind, name=name))
    return Encoded(Form.DENSE, b"".join(packed))


class _Means(NamedTuple):
    """The mean coefficients of chunks [low, high), all of `length`."""

    low: int
    high: int
    length: int
    where: Places  # ascending, counted from the first of these chunks
    mean: torch.Tensor  # float32


def _means(senders: list[_Sender], by_senders: bool, keep_lone: bool, layout: Layout) -> Iterator[_Means]:
    lengths, kept = layout.lengths(), layout.kept_counts()
    readers = [indices.blocks(each.encoded.form, each.encoded.indices, kept, lengths) for each in senders]
    shares = [each.share for each in senders]
    block = _Block(min(layout.numel, max(indices.BLOCK, layout.length)), shares, by_senders, keep_lone)
    sent = zip(*(each.blocks() for each in senders), strict=True)
    # The readers come first in the zip, so that each is run to its end, where it checks for left-over bytes.
    for *chosen, own, (low, high) in zip(*readers, sent, indices.spans(lengths), strict=True):
        yield _Means(low, high, int(lengths[low]), *block.mean(chosen, list(own)))


def _union(means: Iterator[_Means], layout: Layout, kind: WholeKind, name: str) -> Encoded:
    packed: list[bytes] = []
    union: list[npt.NDArray[np.uint16]] = []
    counts: list[Ints] = []
    for low, high, length, where, mean in means:
        packed.append(values.pack(mean, kind, name=name))
        borders = np.searchsorted(where, np.arange(high - low + 1, dtype=np.int32) * length)
        counts.append(borders[1:] - borders[:-1])
        union.append((where - indices.chunk_starts(counts[-1], length)).astype(np.uint16))
    return _shortest(b"".join(packed), np.concatenate(union), np.concatenate(counts), layout, kind)


def _signs(means: Iterator[_Means], layout: Layout, name: str) -> Encoded:
    packed: list[bytes] = []
    counts: list[Ints] = []
    for low, high, length, where, mean in means:
        coefficients = torch.zeros((high - low) * length)
        coefficients[torch.from_numpy(where.astype(np.int64))] = mean
        touched = np.zeros(high - low, dtype=np.bool_)
        touched[where[(mean != 0).numpy()] // length] = True
        weights = dct.invert(coefficients, layout.tile_or_row)
        if not all_finite(weights):
            raise NonFiniteGradient(f"{name}: the mean of the contributions is not finite")
        if not touched.all():
            weights = weights.view(-1, length)[torch.from_numpy(touched)].view(-1)
        counts.append(touched * np.int64(length))
        packed.append(values.sign_bits(weights, counts[-1][touched]))
    return Encoded(Form.SIGN, b"".join(packed), counts=np.concatenate(counts).astype("<u2").tobytes())


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

    def mean(self, places: list[Places], sent: list[torch.Tensor]) -> tuple[Places, torch.Tensor]:
        """(the sorted union of `places`, the mean at each): places are unique within one worker's."""
        for own, each, share in zip(places, sent, self._shares, strict=True):
            at = torch.from_numpy(own.astype(np.int64))
            if self._latest is not None:
                self._latest.index_copy_(0, at, each)
            if self._weights is not None:
                self._weights.scatter_add_(0, at, torch.full_like(each, share))
            self._sums.scatter_add_(0, at, each.mul_(share))
        ordered = np.concatenate(places)
        ordered.sort()
        begins = np.ones(ordered.size, dtype=np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
        first = np.flatnonzero(begins)
        union = ordered[first]  # twice as fast as by `begins`
        at = torch.from_numpy(union.astype(np.int64))
        mean = self._sums.index_select(0, at)
        self._sums.index_fill_(0, at, -0.0)
        if self._weights is not None:
            mean.div_(self._weights.index_select(0, at))
            self._weights.index_fill_(0, at, 0.0)
        if self._totals is not None or self._latest is not None:
            senders = np.diff(first, append=ordered.size)
            if self._totals is not None:
                mean.div_(torch.from_numpy(self._totals[senders]))
            if self._latest is not None:
                mean = torch.where(torch.from_numpy(senders == 1), self._latest.index_select(0, at), mean)
        return union, mean


def _shortest(packed: bytes, union: npt.NDArray[np.uint16], counts: Ints, layout: Layout, kind: WholeKind) -> Encoded:
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
