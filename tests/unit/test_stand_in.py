"""The stand-in for MPS refuses what it should, and nothing that plain training does."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional

import devices
from devices import LikeMps, RefusedByMps

CPU = torch.device("cpu")
SQUARE = torch.arange(16.0).view(4, 4)
STRIDED = SQUARE.t()
FIRST = torch.zeros(1, 4, dtype=torch.int64)
ROW = torch.tensor([0])
DOUBLE, HALF, BF16, UNSIGNED = (
    SQUARE.to(each) for each in (torch.float64, torch.float16, torch.bfloat16, torch.uint32)
)
WINDOW = torch.ones(4)
FIVE = torch.zeros(1, 1, 1, 2, 2)
LARGE = torch.empty(2**30, device="meta")


def an_offset_slice():
    return SQUARE.clone()[1:]


REFUSED = {
    "float64 made": (lambda: torch.zeros(3, dtype=torch.float64), "zeros: torch.float64: there is no float64"),
    "float64 read": (lambda: DOUBLE.sum(), "sum: torch.float64"),
    "float64 in a list": (lambda: torch.stack([DOUBLE, DOUBLE]), "stack: torch.float64"),
    "float64 moved": (lambda: DOUBLE.to("cpu"), "to: torch.float64"),
    "float64 fetched": (lambda: DOUBLE.cpu(), "cpu: torch.float64"),
    "complex made": (lambda: torch.complex(SQUARE, SQUARE), "complex: torch.complex64"),
    "fft": (lambda: torch.fft.rfft(SQUARE), "fft_rfft: .*no FFT"),
    "fft without a complex number": (lambda: torch.fft.fftfreq(4), "fft_fftfreq: .*no FFT"),
    "stft": (lambda: torch.stft(SQUARE[0], 4, window=WINDOW, return_complex=True), "_fft_r2c: .*no FFT"),
    "uint16 made": (lambda: torch.zeros(3, dtype=torch.uint16), "zeros: torch.uint16: .*#176296"),
    "uint16 cast to": (lambda: SQUARE.to(torch.uint16), "_to_copy: torch.uint16: .*#176296"),
    "uint32 cast from": (lambda: UNSIGNED.to(torch.int64), "to: torch.uint32: .*#176296"),
    "uint64 seen as": (lambda: FIRST.view(torch.uint64), "view: torch.uint64: .*#176296"),
    "topk of nothing": (lambda: SQUARE.topk(0), "topk: .*#91878"),
    "topk of five dimensions": (lambda: FIVE.topk(1), "topk: .*#154890"),
    "topk strided": (lambda: STRIDED.topk(1), "topk: .*#175187"),
    "sort strided": (lambda: STRIDED.sort(), "sort: .*#175187"),
    "msort strided": (lambda: STRIDED.msort(), "sort: .*#175187"),
    "argsort strided": (lambda: STRIDED.argsort(), "argsort: .*#175187"),
    "torch.argsort strided": (lambda: torch.argsort(input=STRIDED), "argsort: .*#175187"),
    "isfinite strided": (lambda: STRIDED.isfinite(), "isfinite: .*#183419"),
    "torch.isfinite strided": (lambda: torch.isfinite(input=STRIDED), "isfinite: .*#183419"),
    "isnan strided": (lambda: STRIDED.isnan(), "isnan: .*#183419"),
    "isinf strided": (lambda: torch.isinf(STRIDED), "isinf: .*#183419"),
    "gather strided": (lambda: STRIDED.gather(0, FIRST), "gather: .*#175187"),
    "gather strided within": (lambda: torch.take_along_dim(STRIDED, FIRST, 0), "gather: .*#175187"),
    "scatter strided": (lambda: STRIDED.scatter(0, FIRST, 1.0), "scatter: .*#175187"),
    "scatter_add strided": (lambda: STRIDED.scatter_add(0, FIRST, SQUARE), "scatter_add: .*#175187"),
    "scatter_ strided": (lambda: SQUARE.clone().t().scatter_(0, FIRST, 1.0), "scatter_: .*#175187"),
    "numpy of a tensor on the device": (lambda: SQUARE.numpy(), r"numpy: .* cpu\(\) first"),
    "numpy of a tensor put on the device": (lambda: torch.ones(3).to(CPU).numpy(), r"numpy: .* cpu\(\) first"),
    "host and device": (lambda: SQUARE + SQUARE.cpu(), "add: .* on the host, another on the device"),
    "host and device by numpy": (lambda: torch.from_numpy(np.ones(4, np.float32)) * SQUARE, "mul: .* on the host"),
    "cat of two dtypes": (lambda: torch.cat([SQUARE, HALF]), "cat: .*#189965"),
    "cat of too many": (lambda: torch.cat([LARGE, LARGE, LARGE[:1]]), "cat: .*#189960"),
    "scatter_ into a slice": (lambda: an_offset_slice().scatter_(0, FIRST, 1.0), "scatter_: .*#163327"),
    "scatter_add_ into a slice": (lambda: an_offset_slice().scatter_add_(0, FIRST, SQUARE), "scatter_add_: .*#163327"),
    "scatter_reduce_ into a slice": (
        lambda: an_offset_slice().scatter_reduce_(0, FIRST, SQUARE, "amax"),
        "scatter_reduce_: .*#163327",
    ),
    "index_copy_ into a slice": (lambda: an_offset_slice().index_copy_(0, ROW, SQUARE[:1]), "index_copy_: .*#163327"),
    "index_add_ into a slice": (lambda: an_offset_slice().index_add_(0, ROW, SQUARE[:1]), "index_add_: .*#163327"),
    "index_put_ into a slice": (lambda: an_offset_slice().index_put_((ROW,), SQUARE[:1]), "index_put_: .*#163327"),
    "assignment into a slice": (lambda: an_offset_slice().__setitem__(ROW, 1.0), "index_put_: .*#163327"),
    "to(device) non-blocking": (lambda: SQUARE.to("cpu", non_blocking=True), "to: .*#139550"),
    "to(device) non-blocking by place": (lambda: SQUARE.to("cpu", None, True), "to: .*#139550"),
    "to(dtype) non-blocking by place": (lambda: SQUARE.to(torch.float16, True), "to: .*#139550"),
    "to(other) non-blocking by place": (lambda: SQUARE.to(SQUARE, True, True), "to: .*#139550"),
    "a module non-blocking": (lambda: nn.Linear(2, 2).to("cpu", non_blocking=True), "to: .*#139550"),
    "copy_ non-blocking": (lambda: SQUARE.clone().copy_(SQUARE, non_blocking=True), "copy_: .*#139550"),
    "copy_ non-blocking by place": (lambda: SQUARE.clone().copy_(SQUARE, True), "copy_: .*#139550"),
    "to(device, dtype)": (lambda: SQUARE.to("cpu", torch.float16), "to: .*#189563"),
    "to(device=, dtype=)": (lambda: SQUARE.to(dtype=torch.float16, device="cpu", copy=True), "to: .*#189563"),
    "to(other)": (lambda: SQUARE.to(FIRST), "to: .*#189563"),
    "a module to(device, dtype)": (lambda: nn.Linear(2, 2).to("cpu", torch.float16), "to: .*#189563"),
}
ACCEPTED = {
    "views": lambda: SQUARE.view(2, 8).reshape(16)[3:].view(torch.int32).unsqueeze(0).t().tolist(),
    "numpy of what was fetched": lambda: SQUARE.cpu().numpy().tolist(),
    "float64 and packing on the host": lambda: (
        SQUARE.cpu().double().sum().item(),
        SQUARE.cpu().to(torch.bfloat16).view(torch.int16).tolist(),
        (torch.from_numpy(np.ones(3)) + torch.ones(3)).to(torch.uint16).tolist(),
    ),
    "a host tensor put on the device": lambda: (torch.ones(4, 4).to(CPU) + SQUARE).tolist(),
    "a host tensor copied into one on the device": lambda: SQUARE.clone().copy_(torch.ones(4, 4)).tolist(),
    "a number on the host": lambda: (SQUARE + torch.tensor(2.0)).tolist(),
    "cat strided": lambda: torch.cat([SQUARE, STRIDED]).tolist(),
    "item": lambda: SQUARE[1, 2].item(),
    "printing": lambda: f"{SQUARE} {SQUARE[1, 2]:.3f} {STRIDED!r}",
    "a seed": lambda: torch.randn(5, generator=torch.Generator().manual_seed(1)).tolist(),
    "to(device)": lambda: SQUARE.to("cpu").tolist(),
    "to(dtype)": lambda: SQUARE.to(torch.int32).tolist(),
    "to(device, its own dtype)": lambda: SQUARE.to("cpu", torch.float32, copy=True).tolist(),
    "to(device, dtype, blocking)": lambda: SQUARE.to("cpu", torch.float32, False, True).tolist(),
    "cpu": lambda: STRIDED.cpu().tolist(),
    "copy_ that converts": lambda: torch.zeros(4, 4, dtype=torch.int32).copy_(SQUARE).tolist(),
    "topk": lambda: [each.tolist() for each in SQUARE.view(1, 2, 2, 4).topk(3)],
    "sort, made contiguous": lambda: STRIDED.contiguous().sort(descending=True).indices.tolist(),
    "isfinite of a slice": lambda: SQUARE[1:].isfinite().tolist(),
    "scatter into a slice, out of place": lambda: SQUARE[1:].scatter(0, FIRST, -1.0).tolist(),
    "scatter_ at the front": lambda: SQUARE.clone()[:2].scatter_(0, FIRST, -1.0).tolist(),
    "fill of a slice": lambda: an_offset_slice().fill_(3.0).tolist(),
    "cat": lambda: torch.cat([SQUARE, SQUARE[2:]]).tolist(),
    "cat of the most": lambda: torch.cat([LARGE, LARGE]).numel(),
    "small integers": lambda: (SQUARE.to(torch.uint8).view(torch.int8) + 1).to(torch.int16).tolist(),
}


@pytest.mark.parametrize(("call", "message"), [pytest.param(*each, id=name) for name, each in REFUSED.items()])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_mps_lacks_is_refused_within_and_nowhere_else(call, message, mode):
    with mode():
        call()
        with LikeMps(), pytest.raises(RefusedByMps, match=message):
            call()
        call()


@pytest.mark.parametrize("call", [pytest.param(each, id=name) for name, each in ACCEPTED.items()])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_what_mps_has_gives_the_same_within(call, mode):
    with mode():
        expected = call()
        with LikeMps(strict_bf16=True):
            assert call() == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(3, dtype=torch.bfloat16),
        lambda: SQUARE.bfloat16(),
        lambda: BF16.float(),
        lambda: BF16.view(torch.int16),
    ],
    ids=["made", "cast to", "cast from", "seen as integers"],
)
def test_bf16_is_refused_by_the_strict_one_only(call):
    with LikeMps():
        call()
    with LikeMps(strict_bf16=True), pytest.raises(RefusedByMps, match=r"torch.bfloat16: .*macOS 14"):
        call()


@pytest.mark.parametrize(
    "call",
    [lambda: SQUARE.cuda(non_blocking=True), lambda: SQUARE.cuda(0, True), lambda: SQUARE.cuda(0, non_blocking=True)],
)
def test_cuda_non_blocking_is_refused_before_a_device_is_looked_for(call):
    with LikeMps(), pytest.raises(RefusedByMps, match=r"cuda: .*#189690"):
        call()


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: distributed.all_reduce(x),
        lambda x: distributed.all_reduce(x, async_op=True).wait(),
        lambda x: distributed.broadcast(x, 0),
        lambda x: distributed.all_gather([torch.empty_like(x)], x),
        lambda x: distributed.group.WORLD.allreduce([x]).wait(),
        lambda x: collectives.wait_tensor(collectives.all_reduce(x, "sum", distributed.group.WORLD)),
    ],
    ids=["all_reduce", "all_reduce later", "broadcast", "all_gather", "by the group", "functional"],
)
def test_collectives_are_refused(group, collective):
    tensor = torch.ones(3)
    collective(tensor)
    with LikeMps(), pytest.raises(RefusedByMps, match="gloo has no MPS"):
        collective(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_refused_write_has_not_been_made():
    tensor = SQUARE.clone()
    with LikeMps(), pytest.raises(RefusedByMps):
        tensor[1:].index_add_(0, ROW, SQUARE[:1])
    assert torch.equal(tensor, SQUARE)


class Attention(nn.Module):
    def forward(self, x):
        heads = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return mixed.transpose(1, 2).reshape(x.shape)


def a_model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), Attention(), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.1), nn.Linear(8, 11)
    )


def train(optimizer, steps=3):
    """The losses and what is learned, weights and the optimizer's own, of a few steps."""
    model = a_model()
    chosen = optimizer(model.parameters())
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        chosen.step()
        losses.append(loss.item())
    moments = [each for kept in chosen.state.values() for each in kept.values()]
    return SimpleNamespace(losses=losses, weights=model.state_dict(), moments=moments)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        lambda weights: torch.optim.AdamW(weights, lr=0.01, foreach=True),
    ],
    ids=["sgd", "adamw", "adamw foreach"],
)
def test_training_gives_the_same_weights_to_the_bit(optimizer):
    expected = train(optimizer)
    with LikeMps(strict_bf16=True):
        found = train(optimizer)
    assert found.losses == expected.losses
    assert expected.losses[-1] < expected.losses[0]
    assert expected.weights.keys() == found.weights.keys()
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)
    assert len(found.moments) == len(expected.moments) > 0
    assert all(torch.equal(a, b) for a, b in zip(found.moments, expected.moments, strict=True))


def test_inference_gives_the_same_to_the_bit():
    model, tokens = a_model().eval(), torch.arange(11).view(1, 11)
    with torch.inference_mode():
        expected = model(tokens)
        with LikeMps(strict_bf16=True):
            found = model(tokens)
    assert torch.equal(found, expected)


def test_an_op_of_a_hook_in_the_backward_pass_is_refused():
    copies = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda each: copies.append(each.grad.double()))
    weight.sum().backward()
    with LikeMps(), pytest.raises(RefusedByMps, match=r"_to_copy: torch\.float64"):
        weight.sum().backward()
    assert [each.tolist() for each in copies] == [[1.0, 1.0, 1.0]]


def test_it_can_be_entered_again_and_within_itself():
    mode = LikeMps()
    for _ in range(2):
        with mode, mode, pytest.raises(RefusedByMps):
            SQUARE.double()
        with mode, pytest.raises(RefusedByMps):
            STRIDED.isfinite()
        assert SQUARE.double().dtype == torch.float64


def test_an_error_within_leaves_it():
    with pytest.raises(ZeroDivisionError), LikeMps():
        raise ZeroDivisionError
    assert SQUARE.double().dtype == torch.float64


def test_other_threads_are_left_alone():
    dtypes = []
    with LikeMps():
        thread = threading.Thread(target=lambda: dtypes.append(SQUARE.double().dtype))
        thread.start()
        thread.join()
    assert dtypes == [torch.float64]


@pytest.mark.parametrize("kind", devices.KINDS)
def test_every_kind_runs_where_it_says(kind):
    with kind.running():
        tensor = torch.tensor([3.0, 1.0, 2.0], device=kind.device)
        assert tensor.device.type == kind.device.type
        assert tensor.sort().values.cpu().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("cpu", []),
        ("mps-stand-in", [torch.float64]),
        ("mps-stand-in-strict", [torch.float64, torch.bfloat16]),
    ],
)
def test_a_kind_refuses_what_its_device_lacks(name, refused):
    (kind,) = (each.values[0] for each in devices.KINDS if each.id == name)
    found = []
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        try:
            with kind.running():
                SQUARE.to(dtype)
        except RefusedByMps:
            found.append(dtype)
    assert found == refused


def test_markers_choose_the_kinds_that_need_hardware():
    marked = {each.id: {mark.name for mark in each.marks} for each in devices.KINDS}
    assert marked == {
        "cpu": set(),
        "mps-stand-in": set(),
        "mps-stand-in-strict": set(),
        "cuda": {"cuda", "skipif"},
        "mps": {"mps", "skipif"},
    }
    assert [each.values[0].name for each in devices.KINDS] == list(marked)
