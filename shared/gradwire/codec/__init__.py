"""The codec: tensor -> bytes -> tensor, the same bytes on every device. Knows neither gRPC nor protobuf.

scheme  = codec.TopK(k=64, chunk=4096)
encoded = codec.encode(tensor, scheme)
tensor  = codec.decode(encoded, scheme, shape)
mean    = codec.average([encoded, ...], weights=[...], scheme=scheme, shape=shape)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire.codec import indices, values
from gradwire.codec.average import average
from gradwire.codec.bounds import Bounds, bounds, check_whole, entry_counts
from gradwire.codec.pieces import Joiner, Piece, cut, is_aggregate
from gradwire.codec.scheme import Dense, Encoded, Form, Scheme, TopK, index_forms, is_dense
from gradwire.codec.select import top_k
from gradwire.codec.tiles import Ints, Layout, layout_of
from gradwire.device import to_host
from gradwire.errors import ConfigError, NonFiniteGradient

__all__ = [
    "Bounds",
    "Dense",
    "Encoded",
    "Form",
    "Joiner",
    "Layout",
    "Piece",
    "Scheme",
    "TopK",
    "average",
    "bounds",
    "cut",
    "decode",
    "encode",
    "layout_of",
]


def encode(tensor: torch.Tensor, scheme: Scheme, *, name: str = "tensor") -> Encoded:
    """`tensor` (any shape, strides, float dtype and device) under `scheme`, as bytes.

    The selection runs on the tensor's device; a tensor of no elements gives no bytes.

    Raises NonFiniteGradient, naming `name`, if any of its values is not finite as float32, or one to be sent
    not finite as bf16; ConfigError if its dtype is not a float.
    """
    flat = _finite_float32(tensor, name)
    if not isinstance(scheme, TopK) or is_dense(scheme, flat.numel()):
        return Encoded(Form.DENSE, values.pack(to_host(flat), scheme.values, name=name))
    layout = layout_of(scheme, tensor.shape)
    chosen, kept = top_k(layout.to_chunks(flat), layout)
    packed = values.pack(kept, scheme.values, name=name)
    counts, lengths = layout.kept_counts(), layout.lengths()
    candidates = ((form, indices.pack(form, chosen.numpy(), counts, lengths)) for form in index_forms(scheme))
    form, index_bytes = min(candidates, key=lambda candidate: len(candidate[1]))
    return Encoded(form, packed, index_bytes)


def decode(
    encoded: Encoded, scheme: Scheme, shape: Sequence[int], *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The tensor that `encoded`, a contribution or an aggregate, stands for: contiguous float32 on `device`.

    Raises MalformedTensor if it stands for none of `shape`.
    """
    shape = tuple(int(size) for size in shape)
    aggregate = is_aggregate(encoded)
    check_whole(encoded, scheme, shape, aggregate=aggregate)
    values.check_finite(encoded.values, scheme.values)
    entries = values.unpack(encoded.values, scheme.values)
    if encoded.form is Form.DENSE or not isinstance(scheme, TopK):
        return entries.view(shape).to(device)
    layout = layout_of(scheme, shape)
    counts = entry_counts(layout, encoded.counts, first=0, count=layout.chunks, aggregate=aggregate)
    return _scattered(encoded, entries, counts, layout).to(device)


def _finite_float32(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` as contiguous float32 on its own device, all values finite."""
    if not tensor.is_floating_point():
        raise ConfigError(f"{name}: only float tensors can be encoded; its dtype is {tensor.dtype}")
    flat = tensor.detach().contiguous().to(torch.float32)
    # A sum is finite only if every term is. It may overflow without one that isn't, so only then count them.
    if not math.isfinite(flat.sum().item()):
        broken = int((~torch.isfinite(flat)).sum().item())
        if broken:
            raise NonFiniteGradient(f"{name}: {broken} of {flat.numel()} values are not finite")
    return flat


def _scattered(encoded: Encoded, entries: torch.Tensor, counts: Ints, layout: Layout) -> torch.Tensor:
    """The dense tensor on the host: `entries` at their places, +0.0 elsewhere."""
    flat = torch.zeros(layout.numel)
    lengths, taken = layout.lengths(), 0
    blocks = indices.blocks(encoded.form, encoded.indices, counts, lengths)
    for chosen, (low, high) in zip(blocks, indices.spans(lengths), strict=True):
        at = torch.from_numpy(layout.positions(chosen, counts[low:high], low))
        flat.index_copy_(0, at, entries[taken : taken + len(chosen)])
        taken += len(chosen)
    return flat.view(layout.shape)
