"""The codec: tensor -> bytes -> tensor, the same bytes on every device. Knows neither gRPC nor protobuf.

scheme  = codec.TopK(k=64, chunk=4096)
encoded = codec.encode(tensor, scheme)
tensor  = codec.decode(encoded, scheme, shape)
mean    = codec.average([encoded, ...], weights=[...], scheme=scheme, shape=shape)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gradwire.codec import dct, indices, values
from gradwire.codec.average import average
from gradwire.codec.bounds import Bounds, bounds, check_whole, entry_counts
from gradwire.codec.pieces import Joiner, Piece, cut, is_aggregate
from gradwire.codec.scheme import Dense, Encoded, Form, Scheme, TopK, index_forms, is_dense, value_kind, whole_kind
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
    "is_aggregate",
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
        return Encoded(Form.DENSE, values.pack(to_host(flat), whole_kind(scheme), name=name))
    layout = layout_of(scheme, tensor.shape)
    coefficients = layout.to_chunks(flat)
    if scheme.transform == "dct":
        coefficients = dct.transform(coefficients, layout.tile_or_row)
    return _encoded(*top_k(coefficients, layout), layout, scheme, name)


def decode(
    encoded: Encoded, scheme: Scheme, shape: Sequence[int], *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The tensor that `encoded`, a contribution or an aggregate, stands for: contiguous float32 on `device`.

    Any transform is undone, on `device`. In form SIGN the tensor holds +1, -1, and 0 where nothing came.

    Raises MalformedTensor if it stands for none of `shape`.
    """
    shape = tuple(int(size) for size in shape)
    aggregate = is_aggregate(encoded)
    check_whole(encoded, scheme, shape, aggregate=aggregate)
    if encoded.form is Form.DENSE or not isinstance(scheme, TopK):
        return _decoded_dense(encoded.values, scheme, shape, device)
    layout = layout_of(scheme, shape)
    counts = entry_counts(layout, encoded.counts, form=encoded.form, first=0, count=layout.chunks, aggregate=aggregate)
    kind = value_kind(scheme, encoded.form, aggregate=aggregate)
    values.check(encoded.values, encoded.scales, kind, counts)
    if encoded.form is Form.SIGN:
        return layout.from_chunks(_signs(encoded.values, counts, layout).to(device))
    entries = values.read(encoded.values, encoded.scales, kind, counts)
    flat = _scattered(encoded, entries, counts, layout, device)
    return layout.from_chunks(dct.invert(flat, layout.tile_or_row) if scheme.transform == "dct" else flat)


def _encoded(chosen: torch.Tensor, kept: torch.Tensor, layout: Layout, scheme: TopK, name: str) -> Encoded:
    """Selected coefficients on the host, as bytes."""
    counts, lengths = layout.kept_counts(), layout.lengths()
    scales = b""
    if scheme.values == "sign":
        packed, scales = values.pack_signs(kept, counts, name=name)
    else:
        packed = values.pack(kept, scheme.values, name=name)
    candidates = ((form, indices.pack(form, chosen.numpy(), counts, lengths)) for form in index_forms(scheme))
    form, index_bytes = min(candidates, key=lambda candidate: len(candidate[1]))
    return Encoded(form, packed, index_bytes, scales=scales)


def _finite_float32(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` as contiguous float32 on its own device, all values finite."""
    if not tensor.is_floating_point():
        raise ConfigError(f"{name}: only float tensors can be encoded; its dtype is {tensor.dtype}")
    flat = tensor.detach().contiguous().to(torch.float32)
    if not values.all_finite(flat):
        broken = int((~torch.isfinite(flat)).sum().item())
        raise NonFiniteGradient(f"{name}: {broken} of {flat.numel()} values are not finite")
    return flat


def _decoded_dense(data: bytes, scheme: Scheme, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    kind = whole_kind(scheme)
    values.check(data, b"", kind, np.empty(0, np.int64))
    dense = values.unpack(data, kind).view(shape).to(device)
    if isinstance(scheme, TopK) and scheme.transform == "dct" and not is_dense(scheme, dense.numel()):
        layout = layout_of(scheme, shape)
        return layout.from_chunks(dct.invert(layout.to_chunks(dense), layout.tile_or_row))
    return dense


def _scattered(
    encoded: Encoded, entries: torch.Tensor, counts: Ints, layout: Layout, device: torch.device | str
) -> torch.Tensor:
    """Coefficients in chunk order, 1-D on `device`: `entries` at their places, +0.0 elsewhere."""
    lengths = layout.lengths()
    places = [
        own.astype(np.int64) + low * layout.length
        for own, (low, _) in zip(
            indices.blocks(encoded.form, encoded.indices, counts, lengths), indices.spans(lengths), strict=True
        )
    ]
    at = torch.from_numpy(np.concatenate(places)).to(device)
    return torch.zeros(layout.numel, device=device).scatter_(0, at, entries.to(device))


def _signs(data: bytes, counts: Ints, layout: Layout) -> torch.Tensor:
    """Every weight's sign in chunk order, 1-D on the host; 0.0 in chunks without an entry."""
    signs = torch.zeros(layout.numel)
    signs[torch.from_numpy(np.repeat(counts > 0, layout.lengths()))] = values.signs_of(data, counts)
    return signs
