"""What a round moves, made before any clock starts: contributions as messages, and how long their entries are."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks import gradients
from gradwire import codec, state
from gradwire.codec import Encoded, Form, indices
from gradwire.codec.bounds import entry_counts
from gradwire.codec.tiles import layout_of
from gradwire.manifest import Entry, Manifest
from gradwire.v1 import aggregation_pb2 as pb
from gradwire.wire.calls import slices
from gradwire.wire.channel import PROTOCOL
from gradwire.wire.messages import PartReader, Tally, write_parts
from gradwire.wire.schemas import entry_batches

TIMES: Final = 3  # how often a stage is timed


@dataclass(frozen=True)
class Contributions:
    """One round's contributions: `tensors[worker][entry]`, and their messages but for the header."""

    manifest: Manifest
    tensors: list[list[Encoded]]
    messages: list[list[bytes]]

    def of(self, workers: int) -> Contributions:
        """Those of the first workers alone."""
        return Contributions(self.manifest, self.tensors[:workers], self.messages[:workers])


@dataclass(frozen=True)
class Sizes:
    """Bytes per entry of the sparse tensors in one form, as the codec makes them and as packed for the wire."""

    form: str
    plain: float
    packed: float


@dataclass(frozen=True)
class Aggregate:
    """What the round's aggregate has to be, to the byte, and what it costs to make: CPU seconds of one thread."""

    messages: list[bytes]  # all but the header
    sizes: list[Sizes]
    union: float  # entries, in multiples of what one worker sends
    check_s: float  # one contribution, unpacked and checked
    average_s: float
    pack_s: float

    @property
    def digest(self) -> str:
        """SHA-256 over the messages, in hex."""
        return hashlib.sha256(b"".join(self.messages)).hexdigest()


def contributions(parameters: int, workers: int) -> Contributions:
    """Made-up contributions of `workers` workers to a model of about `parameters`."""
    manifest = gradients.manifest(parameters)
    with ThreadPoolExecutor() as pool:
        jobs = pool.map(lambda numbered: _encoded(numbered[0], numbered[1], workers), enumerate(manifest))
        tensors = [list(each) for each in zip(*jobs, strict=True)]
    return Contributions(manifest, tensors, [_messages(manifest, each) for each in tensors])


def contribution_sizes(round_: Contributions) -> list[Sizes]:
    """U16 and GAP8, of the first worker's."""
    entries, first = _sparse(round_.manifest, round_.tensors[0])
    return [_sizes(_in_form(entries, first, form, form.name.lower()), form) for form in (Form.U16, Form.GAP8)]


def aggregate(round_: Contributions) -> Aggregate:
    """The mean of `round_` with equal weights, made as the aggregator makes it."""
    manifest, weights = round_.manifest, [1.0] * len(round_.tensors)
    parts = [pb.ContributeRequest.FromString(message) for message in round_.messages[0]]

    def check() -> None:
        reader = PartReader(manifest, absent=(), aggregate=False)
        for part in parts[:-1]:
            reader.add(part.part)
        reader.finish(parts[-1].commit)

    def average() -> list[Encoded]:
        means = []
        for entry, sent in zip(manifest, zip(*round_.tensors, strict=True), strict=True):
            mean = codec.average(sent, weights, scheme=entry.scheme, shape=entry.shape, name=entry.name)
            if mean is None:
                raise RuntimeError(f"{entry.name}: an average of nothing")
            means.append(mean)
        return means

    def pack() -> list[bytes]:
        tally = Tally()
        messages = [pb.CollectResponse(part=p).SerializeToString() for p in write_parts(manifest, means, tally)]
        return [*messages, pb.CollectResponse(commit=tally.commit()).SerializeToString()]

    _, check_s = _timed(check)
    means, average_s = _timed(average)
    messages, pack_s = _timed(pack)
    entries, sparse = _sparse(manifest, means)
    _, one = _sparse(manifest, round_.tensors[0])
    sizes = [_sizes(_in_form(entries, sparse, form, None), form) for form in (Form.GAP8, Form.BITMAP)]
    return Aggregate(messages, sizes, _entries(sparse) / _entries(one), check_s, average_s, pack_s)


def join_messages(manifest: Manifest) -> list[bytes]:
    """What a worker joins with; name and incarnation are filled in later."""
    header = pb.JoinHeader(
        protocol=PROTOCOL,
        device="cpu (benchmark)",
        method=manifest.method,
        entries=len(manifest),
        manifest_sha256=manifest.fingerprint,
    )
    batches = [pb.JoinRequest(entries=pb.ManifestEntries(entries=batch)) for batch in entry_batches(manifest)]
    return [each.SerializeToString() for each in (pb.JoinRequest(header=header), *batches)]


def snapshot_messages() -> list[bytes]:
    """A snapshot of hardly anything: no one will load it."""
    data = state.pack({"nothing": torch.zeros(1)})
    header = pb.SnapshotHeader(round=0, size=len(data), sha256=hashlib.sha256(data).digest())
    requests = [
        pb.PublishSnapshotRequest(header=header),
        *(pb.PublishSnapshotRequest(data=each) for each in slices(data)),
    ]
    return [each.SerializeToString() for each in requests]


def _encoded(number: int, entry: Entry, workers: int) -> list[Encoded]:
    tensors = gradients.pseudo_gradients(entry, number, workers)
    return [codec.encode(tensor, entry.scheme, name=entry.name) for tensor in tensors]


def _messages(manifest: Manifest, tensors: Sequence[Encoded]) -> list[bytes]:
    tally = Tally()
    messages = [pb.ContributeRequest(part=part).SerializeToString() for part in write_parts(manifest, tensors, tally)]
    return [*messages, pb.ContributeRequest(commit=tally.commit()).SerializeToString()]


def _sparse(manifest: Manifest, tensors: Sequence[Encoded]) -> tuple[list[Entry], list[Encoded]]:
    chosen = [(entry, each) for entry, each in zip(manifest, tensors, strict=True) if each.form is not Form.DENSE]
    return [entry for entry, _ in chosen], [each for _, each in chosen]


def _entries(tensors: Sequence[Encoded]) -> int:
    return sum(len(each.values) // 2 for each in tensors)


def _in_form(entries: list[Entry], tensors: list[Encoded], form: Form, name: Any) -> tuple[list[Entry], list[Encoded]]:
    """The same tensors with indices in another form; `name` is the scheme's for it, in contributions."""
    changed_entries, changed = [], []
    for entry, each in zip(entries, tensors, strict=True):
        scheme = dataclasses.replace(gradients.SCHEME, indices=name or "auto")
        layout = layout_of(scheme, entry.shape)
        counts = entry_counts(layout, each.counts, form=each.form, first=0, count=layout.chunks, aggregate=name is None)
        chosen = indices.unpack(each.form, each.indices, counts, layout.lengths())
        packed = indices.pack(form, chosen, counts, layout.lengths())
        changed_entries.append(dataclasses.replace(entry, scheme=scheme))
        changed.append(dataclasses.replace(each, form=form, indices=packed))
    return changed_entries, changed


def _sizes(sparse: tuple[list[Entry], list[Encoded]], form: Form) -> Sizes:
    entries, tensors = sparse
    tally = Tally()
    for _ in write_parts(Manifest(gradients.METHOD, tuple(entries)), tensors, tally):
        pass
    count = _entries(tensors)
    return Sizes(form.name, tally.payload_bytes / count, tally.wire_bytes / count)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """(its result, the median of its CPU time): what other programs do disturbs that least."""
    spent = []
    for _ in range(TIMES):
        start = time.thread_time()
        result = function()
        spent.append(time.thread_time() - start)
    return result, sorted(spent)[TIMES // 2]
