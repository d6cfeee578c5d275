"""The device half of `encode`, under a dispatch mode that refuses what Apple's MPS lacks or gets wrong."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire import codec
from gradwire.codec import select

CONTIGUOUS_ONLY = {"topk", "sort", "argsort", "isfinite", "gather", "scatter_"}
LACKING = {torch.float64, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64}


class LikeMps(TorchDispatchMode):
    """Refuses unsupported dtypes, top-k of nothing or of many dimensions, and strided sorts."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        for each in (*args, *(out if isinstance(out, tuple) else (out,))):
            if isinstance(each, torch.Tensor):
                assert each.dtype not in LACKING, f"{name} on {each.dtype}"
                assert name not in CONTIGUOUS_ONLY or each.is_contiguous(), f"{name} on a strided tensor"
        if name == "topk":
            assert args[1] > 0
            assert args[0].dim() <= 4
        if name == "scatter_":
            assert args[0].storage_offset() == 0, "a scatter into a slice with an offset"
        return out


@pytest.mark.parametrize("layout", ["tiles", "flat"])
@pytest.mark.parametrize("shape", [(64, 80), (5, 4, 3, 2, 40), (5001,), ()])
@pytest.mark.parametrize("ties", [False, True])
def test_selection_uses_nothing_that_mps_lacks(layout, shape, ties, monkeypatch):
    monkeypatch.setattr(select, "BLOCK", 1024)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    tensor = tensor.round() if ties else tensor
    geometry = codec.layout_of(codec.TopK(k=9, chunk=256, layout=layout), shape)
    expected = select.top_k(geometry.to_chunks(tensor), geometry)
    with LikeMps():
        chosen, kept = select.top_k(geometry.to_chunks(tensor), geometry)
    assert torch.equal(chosen, expected[0])
    assert torch.equal(kept, expected[1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rounding", [False, True])
def test_cuda_gives_the_bytes_of_the_cpu(rounding):
    tensor = torch.randn(300, 640, generator=torch.Generator().manual_seed(6))
    tensor = tensor.round() if rounding else tensor
    for scheme in (codec.TopK(), codec.TopK(layout="flat", k=17), codec.Dense()):
        assert codec.encode(tensor.cuda(), scheme) == codec.encode(tensor, scheme)


@pytest.mark.mps
@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no Apple GPU")
@pytest.mark.parametrize("rounding", [False, True])
def test_mps_gives_the_bytes_of_the_cpu(rounding):
    tensor = torch.randn(300, 640, generator=torch.Generator().manual_seed(6))
    tensor = tensor.round() if rounding else tensor
    for scheme in (codec.TopK(), codec.TopK(layout="flat", k=17), codec.Dense()):
        assert codec.encode(tensor.to("mps"), scheme) == codec.encode(tensor, scheme)
