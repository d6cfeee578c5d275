"""The orthonormal DCT-II of every tile, by matrix product, as in DeMo (Peng et al., 2024).

A basis is built once on the host in float64 and cast: FFT and float64 are what devices lack.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from gradwire.device import full_precision


def transform(chunks: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """The coefficients of tiles in chunk order: contiguous 1-D float32 to the same, on its device."""
    down, across = (_basis(side, chunks.device) for side in tile)
    return _product(down, chunks, across.T, tile)


def invert(coefficients: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """The tiles that have these coefficients; the inverse of an orthonormal basis is its transpose."""
    down, across = (_basis(side, coefficients.device) for side in tile)
    return _product(down.T, coefficients, across, tile)


def _product(left: torch.Tensor, flat: torch.Tensor, right: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    with full_precision(flat.device):
        tiles = flat.view(-1, *tile)
        product = tiles if tile[1] == 1 else torch.matmul(tiles, right)
        product = product if tile[0] == 1 else torch.matmul(left, product)
    return product.contiguous().view(-1)


@functools.lru_cache(maxsize=512)
def _basis(side: int, device: torch.device) -> torch.Tensor:
    """[frequency, place], float32."""
    frequency, place = np.arange(side)[:, None], np.arange(side)[None, :]
    basis = np.sqrt(2.0 / side) * np.cos(np.pi * (2 * place + 1) * frequency / (2 * side))
    basis[0] /= np.sqrt(2.0)
    return torch.from_numpy(basis.astype(np.float32)).to(device)
