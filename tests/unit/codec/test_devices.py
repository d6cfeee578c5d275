"""The codec's device half on every kind of device: the same bytes from the same coefficients, tensors where asked."""

import pytest
import torch

from devices import KINDS
from gradwire import codec
from gradwire.codec import select
from gradwire.errors import NonFiniteGradient

SHAPES = [(64, 80), (5, 4, 3, 2, 40), (5001,), (97, 13), (1,), (), (0, 4)]
SCHEMES = [
    codec.Dense(),
    codec.Dense("fp32"),
    codec.TopK(k=9, chunk=256, dense_below=0),
    codec.TopK(k=9, chunk=256, layout="flat", values="fp32", dense_below=0),
    codec.TopK(k=9, chunk=256, values="sign", dense_below=0),
    codec.TopK(k=256, chunk=256, dense_below=0),
]


def tensor_of(shape, *, ties):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return tensor.round() if ties else tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_bytes_are_those_of_the_cpu_and_come_back_as_the_same_tensor(scheme, ties, shape, kind, monkeypatch):
    monkeypatch.setattr(select, "BLOCK", 1024)  # so that there are several
    tensor = tensor_of(shape, ties=ties)
    expected = codec.encode(tensor, scheme)
    dense = codec.decode(expected, scheme, shape)
    moved = tensor.to(kind.device)
    with kind.running():
        encoded = codec.encode(moved, scheme)
        decoded = codec.decode(encoded, scheme, shape, device=kind.device)
        left = moved - decoded
    assert encoded == expected
    assert decoded.device.type == kind.device.type
    assert torch.equal(decoded.cpu(), dense)
    assert torch.equal(left.cpu(), tensor - dense)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_views_are_encoded_as_their_copies(kind):
    tensor = tensor_of((60, 70), ties=False).to(kind.device)
    with kind.running():
        for view in (tensor.t(), tensor[5:, ::2], tensor.unsqueeze(0).expand(2, 60, 70), tensor.flatten()[7:4007]):
            for scheme in SCHEMES:
                assert codec.encode(view, scheme) == codec.encode(view.contiguous(), scheme)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(128, 192), (97, 13), (96,)])
def test_the_transform_is_that_of_the_cpu_up_to_rounding(shape, kind):
    tensor = tensor_of(shape, ties=False)
    scheme = codec.TopK(k=4096, transform="dct", values="fp32", dense_below=0)
    with kind.running():
        encoded = codec.encode(tensor.to(kind.device), scheme)
        back = codec.decode(encoded, scheme, shape, device=kind.device)
    torch.testing.assert_close(codec.decode(encoded, scheme, shape), tensor, atol=1e-5, rtol=0)
    torch.testing.assert_close(back.cpu(), tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_update_is_the_same_on_every_kind(kind):
    scheme = codec.TopK(k=5, chunk=256, transform="dct", dense_below=0, update="sign")
    encoded = codec.encode(tensor_of((64, 48), ties=False), scheme)
    update = codec.average([encoded], [1.0], scheme=scheme, shape=(64, 48))
    expected = codec.decode(update, scheme, (64, 48))
    with kind.running():
        decoded = codec.decode(update, scheme, (64, 48), device=kind.device)
    assert torch.equal(decoded.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", [*SCHEMES, codec.TopK(k=9, chunk=256, transform="dct", dense_below=0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_found_on_every_kind(bad, scheme, kind):
    tensor = tensor_of((64, 80), ties=False)
    tensor[3, 5] = tensor[40, 7] = bad
    with kind.running(), pytest.raises(NonFiniteGradient, match=r"layer: 2 of 5120 values are not finite"):
        codec.encode(tensor.to(kind.device), scheme, name="layer")


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_input_is_encoded_as_its_float32(kind):
    tensor = tensor_of((64, 80), ties=False)
    dtypes = [torch.float16] if "strict" in kind.name else [torch.float16, torch.bfloat16]
    for dtype in dtypes:
        half = tensor.to(dtype)
        with kind.running():
            assert codec.encode(half.to(kind.device), SCHEMES[2]) == codec.encode(half.float(), SCHEMES[2])
