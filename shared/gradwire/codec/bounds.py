"""What may be in a run of chunks, known before its bytes are looked at: forms, counts and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.codec import indices, values
from gradwire.codec.scheme import Encoded, Form, Scheme, TopK, index_forms, is_dense, value_kind
from gradwire.codec.tiles import Ints, Layout, layout_of
from gradwire.errors import MalformedTensor


@dataclass(frozen=True)
class Bounds:
    """Bytes of the values and scales, exactly, and of the indices, at most."""

    values_bytes: int
    indices_bytes: int
    scales_bytes: int = 0


def bounds(
    scheme: Scheme,
    shape: Sequence[int],
    *,
    form: Form,
    first: int,
    count: int,
    aggregate: bool,
    counts: bytes = b"",
) -> Bounds:
    """The sizes that chunks [first, first + count) (elements, in form DENSE) of a tensor of `shape` can have.

    counts: u16 entries per chunk of an aggregate; empty in a contribution and in form DENSE.

    Raises MalformedTensor for a form that `scheme` doesn't allow there, a range that is empty or leaves the
    tensor, or counts that can't be: before anything is allocated in proportion to a number that a peer sent.
    """
    if form not in _allowed_forms(scheme, shape, aggregate):
        allowed = ", ".join(each.name for each in _allowed_forms(scheme, shape, aggregate))
        what = "an aggregate" if aggregate else "a contribution"
        raise MalformedTensor(f"form {form_name(form)} in {what}: allowed here is {allowed}")
    form = Form(form)  # may be a plain number, off the wire
    total = units(scheme, shape, form)
    if first < 0 or count < 1 or first + count > total:
        unit = "elements" if form is Form.DENSE else "chunks"
        raise MalformedTensor(f"{unit} {first} to {first + count - 1} of a tensor that has {total} {unit}")
    kind = value_kind(scheme, form, aggregate=aggregate)
    if form is Form.DENSE or not isinstance(scheme, TopK):
        if counts:
            raise MalformedTensor("a dense tensor with counts per chunk")
        return Bounds(count * values.WIDTH[kind], 0)
    layout = layout_of(scheme, shape)
    entries = entry_counts(layout, counts, form=form, first=first, count=count, aggregate=aggregate)
    return Bounds(
        values_bytes=int(values.chunk_bytes(kind, entries).sum()),
        indices_bytes=indices.max_bytes(form, entries, layout.lengths(first, count)),
        scales_bytes=count * values.SCALE_BYTES if kind == "sign" and not aggregate else 0,
    )


def entry_counts(layout: Layout, counts: bytes, *, form: Form, first: int, count: int, aggregate: bool) -> Ints:
    """Entries of each of the chunks [first, first + count), a range inside the tensor: int64.

    Raises MalformedTensor for counts in a contribution, and in an aggregate for any that is below what one
    contributor sends of that chunk or above the chunk's length; in form SIGN for any but 0 and the length.
    """
    kept = layout.kept_counts(first, count)
    if not aggregate:
        if counts:
            raise MalformedTensor("a contribution with counts per chunk: the scheme gives them")
        return kept
    if len(counts) != 2 * count:
        raise MalformedTensor(f"{len(counts)} bytes of counts for {count} chunks, 2 bytes each")
    entries, lengths = np.frombuffer(counts, dtype="<u2").astype(np.int64), layout.lengths(first, count)
    if form is Form.SIGN:
        wrong, possible = (entries != 0) & (entries != lengths), "0 or {length} (its length)"
    else:
        wrong = (entries < kept) | (entries > lengths)
        possible = "{kept} (sent by one worker) to {length} (its length)"
    if wrong.any():
        at = int(np.argmax(wrong))
        words = possible.format(kept=kept[at], length=lengths[at])
        raise MalformedTensor(f"chunk {first + at} with a count of {entries[at]}: possible are {words}")
    return entries


def check_whole(encoded: Encoded, scheme: Scheme, shape: Sequence[int], *, aggregate: bool) -> None:
    """Raises MalformedTensor unless form, counts and sizes of `encoded` are those of a tensor of `shape`."""
    if math.prod(shape) == 0:
        if encoded.form is not Form.DENSE or encoded.nbytes:
            raise MalformedTensor(f"{encoded.nbytes} bytes for a tensor of no elements")
        return
    form, count = encoded.form, units(scheme, shape, encoded.form)
    limits = bounds(scheme, shape, form=form, first=0, count=count, aggregate=aggregate, counts=encoded.counts)
    check_sizes(encoded, limits)


def units(scheme: Scheme, shape: Sequence[int], form: Form | None) -> int:
    """What a tensor of `shape` is counted in: elements in form DENSE, chunks in any other."""
    if form in (None, Form.DENSE) or not isinstance(scheme, TopK):
        return math.prod(shape)
    return layout_of(scheme, shape).chunks


def check_sizes(encoded: Encoded, limits: Bounds) -> None:
    """Raises MalformedTensor unless the fields' lengths are within `limits`."""
    if len(encoded.values) != limits.values_bytes:
        raise MalformedTensor(f"{len(encoded.values)} bytes of values; there should be {limits.values_bytes}")
    if len(encoded.indices) > limits.indices_bytes:
        raise MalformedTensor(f"{len(encoded.indices)} bytes of indices; there can be {limits.indices_bytes} at most")
    if len(encoded.scales) != limits.scales_bytes:
        raise MalformedTensor(f"{len(encoded.scales)} bytes of scales; there should be {limits.scales_bytes}")


def _allowed_forms(scheme: Scheme, shape: Sequence[int], aggregate: bool) -> tuple[Form, ...]:
    if not isinstance(scheme, TopK) or is_dense(scheme, math.prod(shape)):
        return (Form.DENSE,)
    if aggregate and scheme.update == "sign":
        return (Form.SIGN,)
    return (Form.GAP8, Form.BITMAP, Form.DENSE) if aggregate else index_forms(scheme)


def form_name(form: int) -> str:
    """The name of a form, or the number of none."""
    return Form(form).name if form in Form._value2member_map_ else str(form)
