"""Pseudo-gradients made up to look like those of a transformer: heavy tails, rows of very different size, a part that
all workers share and a part of their own, so that packing and the overlap of what workers keep come out as they would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gradwire.codec import TopK
from gradwire.manifest import Entry, Manifest

Floats = npt.NDArray[np.float32]

SCHEME: Final = TopK(k=64, chunk=4096, layout="tiles", values="bf16", normalization="senders")
METHOD: Final = "benchmark"

DIM: Final = 512
FFN: Final = 1408
RANK: Final = 8
# Standard deviations of the parts that make up an element; rows and columns differ by log-normal factors.
SHARED_LOW_RANK: Final = 0.4
SHARED_NOISE: Final = 0.2
OWN_NOISE: Final = 1.0
TAIL: Final = 0.5  # sigma of the log-normal factor of each element's noise
ROW_SPREAD: Final = 0.6
COLUMN_SPREAD: Final = 0.4
OWN_SPREAD: Final = 0.5  # of the columns of the workers' own parts


def manifest(parameters: int) -> Manifest:
    """Tensors of a decoder-only transformer of about `parameters`: matrices, and many small norms and biases."""
    layer: list[tuple[str, tuple[int, ...]]] = [
        ("attention_norm.weight", (DIM,)),
        ("attention.qkv.weight", (3 * DIM, DIM)),
        ("attention.qkv.bias", (3 * DIM,)),
        ("attention.out.weight", (DIM, DIM)),
        ("attention.out.bias", (DIM,)),
        ("ffn_norm.weight", (DIM,)),
        ("ffn.gate.weight", (FFN, DIM)),
        ("ffn.up.weight", (FFN, DIM)),
        ("ffn.down.weight", (DIM, FFN)),
        ("ffn.down.bias", (DIM,)),
    ]
    each = sum(int(np.prod(shape)) for _, shape in layer)
    layers = max(1, parameters * 4 // 5 // each)
    rows = max(1, round((parameters - layers * each) / DIM / 64)) * 64
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding.weight", (rows, DIM))]
    shapes += [(f"layers.{number}.{name}", shape) for number in range(layers) for name, shape in layer]
    shapes += [("norm.weight", (DIM,))]
    return Manifest(METHOD, tuple(Entry(name, shape, SCHEME) for name, shape in shapes))


def pseudo_gradients(entry: Entry, number: int, workers: int) -> Iterator[torch.Tensor]:
    """One float32 tensor per worker for the `number`-th entry; the same on every call."""
    rows, cols = (entry.shape[0], entry.elements // entry.shape[0]) if len(entry.shape) > 1 else (1, entry.elements)
    common = np.random.default_rng((1, number))
    scale = np.exp(ROW_SPREAD * _normal(common, rows, 1)) * np.exp(COLUMN_SPREAD * _normal(common, 1, cols))
    shared = SHARED_LOW_RANK / RANK**0.5 * (_normal(common, rows, RANK) @ _normal(common, RANK, cols))
    shared += SHARED_NOISE * _heavy_tailed(common, rows, cols)
    for worker in range(workers):
        generator = np.random.default_rng((2, number, worker))
        own = OWN_NOISE * np.exp(OWN_SPREAD * _normal(generator, 1, cols)) * _heavy_tailed(generator, rows, cols)
        yield torch.from_numpy(1e-3 * scale * (shared + own)).view(entry.shape)


def _normal(generator: np.random.Generator, rows: int, cols: int) -> Floats:
    return generator.standard_normal((rows, cols), dtype=np.float32)


def _heavy_tailed(generator: np.random.Generator, rows: int, cols: int) -> Floats:
    values: Floats = _normal(generator, rows, cols) * np.exp(TAIL * _normal(generator, rows, cols))
    return values
