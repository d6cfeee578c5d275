"""The transform against scipy's in float64, and what the codec does with it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import torch

from gradwire import codec
from gradwire.codec import Form, dct


def tiles_of(tensor, tile):
    """The tiles of a matrix, cut by slicing; a vector is one row."""
    matrix = np.atleast_2d(tensor.numpy().astype(np.float64))
    high, wide = tile
    rows, cols = matrix.shape
    return [matrix[r : r + high, c : c + wide] for r in range(0, rows, high) for c in range(0, cols, wide)]


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((128, 192), (64, 64)), ((48, 35), (48, 35)), ((127, 6), (1, 6)), ((96,), (1, 48)), ((7,), (1, 7))],
)
def test_coefficients_are_scipys(shape, tile):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    layout = codec.layout_of(codec.TopK(transform="dct"), shape)
    assert layout.tile == tile
    ours = dct.transform(layout.to_chunks(tensor), tile).view(-1, *tile).numpy()
    expected = [scipy.fft.dctn(each, type=2, norm="ortho") for each in tiles_of(tensor, tile)]
    np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("shape", [(128, 192), (17, 29), (5, 4, 6), (13,)])
def test_the_inverse_gives_the_tensor_back(shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    scheme = codec.TopK(k=4096, transform="dct", values="fp32", dense_below=0)
    encoded = codec.encode(tensor, scheme)
    assert encoded.form is not Form.DENSE
    torch.testing.assert_close(codec.decode(encoded, scheme, shape), tensor, atol=1e-5, rtol=0)


def test_few_coefficients_hold_a_smooth_tensor():
    wave = torch.outer(torch.cos(torch.pi * (torch.arange(64) + 0.5) * 3 / 64), torch.ones(64))
    scheme = codec.TopK(k=1, transform="dct", values="fp32", dense_below=0)
    encoded = codec.encode(wave, scheme)
    # The third frequency down, none across; its weight is the norm of the wave, sqrt(32 * 64).
    assert np.frombuffer(encoded.indices, np.uint8).tolist() == [192]
    assert np.frombuffer(encoded.values, np.float32) == pytest.approx([2048**0.5], rel=1e-6)
    torch.testing.assert_close(codec.decode(encoded, scheme, (64, 64)), wave, atol=1e-5, rtol=0)


def test_small_tensors_travel_dense_and_untransformed():
    tensor = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    scheme = codec.TopK(transform="dct", values="fp32")
    encoded = codec.encode(tensor, scheme)
    assert encoded.values == tensor.numpy().tobytes()
    assert torch.equal(codec.decode(encoded, scheme, (8, 8)), tensor)


def test_autocast_and_low_matmul_precision_outside_change_nothing():
    tensor = torch.randn(128, 128, generator=torch.Generator().manual_seed(4))
    scheme = codec.TopK(transform="dct")
    expected = codec.encode(tensor, scheme)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert codec.encode(tensor, scheme) == expected
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def senders_mean(tensors, scheme, shape):
    """Encodes each, and averages with equal weights."""
    encoded = [codec.encode(each, scheme) for each in tensors]
    return encoded, codec.average(encoded, [1.0] * len(encoded), scheme=scheme, shape=shape)


@pytest.mark.parametrize("shape", [(128, 192), (100, 36), (4, 5, 48), (4160,)])
def test_update_sign_holds_the_sign_of_every_weight(shape):
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(shape, generator=generator) for _ in range(3)]
    coefficients = codec.TopK(k=9, transform="dct", values="fp32", dense_below=0, normalization="senders")
    signs = codec.TopK(k=9, transform="dct", values="fp32", dense_below=0, normalization="senders", update="sign")
    _, mean = senders_mean(tensors, coefficients, shape)
    _, signed = senders_mean(tensors, signs, shape)
    weights = codec.decode(mean, coefficients, shape)
    decoded = codec.decode(signed, signs, shape)
    assert signed.form is Form.SIGN
    assert not signed.indices
    assert set(decoded.unique().tolist()) <= {-1.0, 1.0}
    certain = weights.abs() > 1e-5
    assert certain.float().mean() > 0.99
    assert torch.equal(decoded[certain], weights.sign()[certain])


def test_a_tile_that_nobody_touched_has_no_update():
    tensor = torch.zeros(64, 192)
    tensor[:, 64:128] = torch.randn(64, 64, generator=torch.Generator().manual_seed(6))
    scheme = codec.TopK(k=4, transform="dct", normalization="senders", update="sign")
    _, mean = senders_mean([tensor, tensor], scheme, (64, 192))
    decoded = codec.decode(mean, scheme, (64, 192))
    assert np.frombuffer(mean.counts, "<u2").tolist() == [0, 4096, 0]
    assert len(mean.values) == 512
    assert decoded[:, :64].abs().sum() == 0
    assert decoded[:, 128:].abs().sum() == 0
    assert decoded[:, 64:128].abs().sum() == 4096


def test_an_exact_zero_in_a_touched_tile_counts_as_positive():
    # The weights of coefficients (c0, c1) of a pair are (c0 + c1, c0 - c1) / sqrt(2).
    scheme = codec.TopK(k=2, chunk=4, transform="dct", dense_below=0, update="sign", indices="u8")
    one = codec.Encoded(Form.U8, bytes.fromhex("803f803f80bf803f00000000"), bytes([0, 1, 0, 1, 0, 1]))
    mean = codec.average([one], [1.0], scheme=scheme, shape=(1, 6))
    assert codec.decode(mean, scheme, (1, 6)).tolist() == [[1.0, 1.0, 1.0, -1.0, 0.0, 0.0]]
