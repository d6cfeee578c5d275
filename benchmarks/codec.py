"""`python -m benchmarks.codec`: what encoding, decoding and averaging cost per element, on one core.

Against `torch.topk` alone on the same coefficients, a plain version of the public formats (int64 indices, float32
values), and bare matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import torch
import typer

from benchmarks import machine
from benchmarks.gradients import pseudo_gradients
from gradwire import codec
from gradwire.codec import Dense, Scheme, TopK, dct
from gradwire.manifest import Entry

SHAPE: Final = (2048, 2048)
NUMEL: Final = SHAPE[0] * SHAPE[1]
K: Final = 64
CHUNK: Final = 4096
TILE: Final = (64, 64)
ENCODE_GOAL: Final = 1.5  # times torch.topk alone
AVERAGE_GOAL: Final = 15.0  # ns per value and core, the indices' unpacking included

SCHEMES: Final[dict[str, Scheme]] = {
    "dense bf16": Dense("bf16"),
    "dense fp32": Dense("fp32"),
    "top-k, tiles": TopK(),
    "top-k, flat": TopK(layout="flat"),
    "top-k, u16 indices": TopK(indices="u16"),
    "top-k, fp32 values": TopK(values="fp32"),
    "top-k, one-bit values": TopK(values="sign"),
    "DCT, top-k": TopK(transform="dct"),
}
AVERAGES: Final[dict[str, TopK]] = {
    "mean over contributors": TopK(),
    "mean over senders": TopK(normalization="senders"),
    "one-bit values": TopK(values="sign", normalization="senders"),
    "clipped to the median": TopK(normalization="senders", clip="median"),
    "DCT, coefficients": TopK(transform="dct", normalization="senders"),
    "DCT, sign of every weight": TopK(transform="dct", normalization="senders", update="sign"),
}


@dataclass(frozen=True)
class Plain:
    """The public formats, written down straight: 12 bytes an entry."""

    indices: torch.Tensor  # int64, position in the tensor
    values: torch.Tensor  # float32


def main(
    repeats: Annotated[int, typer.Option(help="Timings of each, of which the fastest counts.", min=1)] = 7,
) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    tensors = list(pseudo_gradients(Entry("weight", SHAPE, TopK()), 0, 8))
    print(f"{machine.description()}, PyTorch {torch.__version__}, one thread")
    print(f"{NUMEL / 1e6:.1f} M elements, {K} of {CHUNK}")
    print()
    encoding_table(tensors[0], repeats)
    print()
    transform_table(tensors[0], repeats)
    print()
    average_table(tensors, repeats)


def encoding_table(tensor: torch.Tensor, repeats: int) -> None:
    """Encode and decode, ns per element of the tensor."""
    magnitudes = chunks_of(tensor).abs()
    bare = fastest(repeats, torch.topk, magnitudes, K, dim=1, sorted=False) / NUMEL
    plain = plain_encode(tensor)
    print(f"{'ns per element':<26}{'encode':>8}{'x topk':>8}{'decode':>8}{'bytes/entry':>13}")
    print(f"{'torch.topk alone':<26}{bare:>8.2f}{1:>8.2f}")
    there = fastest(repeats, plain_encode, tensor) / NUMEL
    back = fastest(repeats, plain_decode, plain) / NUMEL
    print(f"{'int64 + float32':<26}{there:>8.2f}{there / bare:>8.2f}{back:>8.2f}{12:>13.2f}")
    for name, scheme in SCHEMES.items():
        encoded = codec.encode(tensor, scheme)
        there = fastest(repeats, codec.encode, tensor, scheme) / NUMEL
        back = fastest(repeats, codec.decode, encoded, scheme, SHAPE) / NUMEL
        size = encoded.nbytes / entries_of(scheme)
        print(f"{name:<26}{there:>8.2f}{there / bare:>8.2f}{back:>8.2f}{size:>13.2f}")
    print(f"Goal: encoding, without a transform, at most {ENCODE_GOAL} x topk.")


def transform_table(tensor: torch.Tensor, repeats: int) -> None:
    """The transform against the two products that it is."""
    flat = chunks_of(tensor).reshape(-1)
    tiles, square = flat.view(-1, *TILE), torch.randn(TILE)
    products = fastest(repeats, lambda: square @ (tiles @ square)) / NUMEL
    print(f"{'ns per element':<26}{'time':>8}{'x products':>12}")
    print(f"{'two matrix products':<26}{products:>8.2f}{1:>12.2f}")
    for name, function in (("DCT", dct.transform), ("inverse", dct.invert)):
        each = fastest(repeats, function, flat, TILE) / NUMEL
        print(f"{name:<26}{each:>8.2f}{each / products:>12.2f}")


def average_table(tensors: Sequence[torch.Tensor], repeats: int) -> None:
    """The aggregator's part: from contributions as bytes to an aggregate as bytes, ns per value that came in."""
    print(f"{'ns per value':<30}{'2 workers':>10}{'8 workers':>10}{'8, own weights':>16}")
    values = NUMEL // CHUNK * K
    plain = [plain_encode(tensor) for tensor in tensors]
    two, eight = (fastest(repeats, plain_average, plain[:count]) / values / count for count in (2, 8))
    print(f"{'int64 + float32':<30}{two:>10.1f}{eight:>10.1f}")
    for name, scheme in AVERAGES.items():
        encoded = [codec.encode(tensor, scheme) for tensor in tensors]
        two, eight, own = (
            fastest(repeats, codec.average, encoded[: len(weights)], weights, scheme=scheme, shape=SHAPE)
            / values
            / len(weights)
            for weights in ([1.0] * 2, [1.0] * 8, [float(1 + n) for n in range(8)])
        )
        print(f"{name:<30}{two:>10.1f}{eight:>10.1f}{own:>16.1f}")
    print(f"Goal: at most {AVERAGE_GOAL:g} ns per value, from top-k contributions to their mean.")


def chunks_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tiles of the tensor, one a row."""
    return codec.layout_of(TopK(), SHAPE).to_chunks(tensor).view(-1, CHUNK)


def entries_of(scheme: Scheme) -> int:
    """How many coefficients are sent."""
    return NUMEL if isinstance(scheme, Dense) else NUMEL // CHUNK * K


def plain_encode(tensor: torch.Tensor) -> Plain:
    """The largest of every run of 4096, by `topk` and `gather`."""
    chunks = tensor.view(-1, CHUNK)
    chosen = chunks.abs().topk(K, dim=1, sorted=False).indices
    starts = torch.arange(len(chunks)).mul_(CHUNK).view(-1, 1)
    return Plain((chosen + starts).view(-1), chunks.gather(1, chosen).view(-1))


def plain_decode(plain: Plain) -> torch.Tensor:
    """The dense tensor."""
    return torch.zeros(NUMEL).scatter_(0, plain.indices, plain.values).view(SHAPE)


def plain_average(contributions: Sequence[Plain]) -> torch.Tensor:
    """The mean over senders, in a dense tensor."""
    total, senders = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for each in contributions:
        total.scatter_add_(0, each.indices, each.values)
        senders.scatter_add_(0, each.indices, torch.ones_like(each.values))
    return total.div_(senders.clamp_(min=1))


def fastest(repeats: int, function: Callable[..., object], *arguments: object, **options: object) -> float:
    """The time of the fastest of some calls after a first one, in ns."""
    function(*arguments, **options)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*arguments, **options)
        times.append(time.perf_counter() - start)
    return min(times) * 1e9


if __name__ == "__main__":
    typer.run(main)
