"""What a device can do is tried, once, and nowhere else does anything ask which one it is."""

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from devices import KINDS
from gradwire import device
from gradwire.errors import ConfigError

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("shared", "services", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "v1" not in path.parts and path != Path(device.__file__)
]
MODULES = {"cuda", "mps", "xpu", "mkldnn", "backends", "accelerator"}
ATTRIBUTES = {"is_cuda", "is_mps", "is_cpu", "get_device", "get_device_name"}


def questions(source: str) -> list[str]:
    """Where code asks for a device type: `.device.type`, `torch.cuda...`, `x.is_cuda`, a comparison with a name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            of_device = node.attr == "type" and "device" in ast.unparse(node.value)
            if (of_torch and node.attr in MODULES) or node.attr in ATTRIBUTES or of_device:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Compare):
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if words & {"cuda", "mps", "cpu"}:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_device_py_asks_for_a_device_type(path):
    assert questions(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "if tensor.device.type == 'cuda': pass",
        "torch.cuda.synchronize()",
        "torch.backends.mps.is_available()",
        "tensor.is_cuda",
        "if str(device) == 'mps': pass",
        "device.type in ('cuda', 'mps')",
    ],
)
def test_the_search_finds_a_question(line):
    assert questions(line)


def test_auto_takes_what_works_and_in_its_order(monkeypatch):
    for there in (("cuda", "mps", "cpu"), ("mps", "cpu"), ("cpu",)):
        monkeypatch.setattr(device, "_works", lambda name, there=there: name in there)
        assert device.pick("auto").type == there[0]


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "mps:7", ""])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match=rf"--device {name}: "):
        device.pick(name)


@pytest.mark.parametrize("kind", KINDS)
def test_to_host_gives_the_same_numbers_contiguous_in_their_own_dtype(kind):
    original = torch.arange(12.0).view(3, 4).to(torch.float16)
    tensor = original.to(kind.device).t()
    with kind.running():
        host = device.to_host(tensor)
        assert host.is_contiguous()
        numbers = host.numpy()
    assert numbers.tolist() == original.t().tolist()
    assert host.dtype == torch.float16


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_tried_and_a_device_without_it_says_so(kind):
    device._bf16_is_right.cache_clear()
    if "strict" in kind.name:
        with kind.running(), pytest.raises(ConfigError, match="lacks it, or gets it wrong; try --precision auto"):
            device.autocast(kind.device, "bf16")
        with kind.running(), device.autocast(kind.device, "auto"):
            assert not torch.is_autocast_enabled(kind.device.type)
    else:
        with kind.running(), device.autocast(kind.device, "bf16"):
            assert torch.is_autocast_enabled(kind.device.type)
    device._bf16_is_right.cache_clear()


def test_a_device_that_attends_to_the_future_in_bf16_does_not_have_it(monkeypatch):
    def leaking(query, key, value, is_causal):
        return torch.softmax(query.float() @ key.float().mT / 8, -1).to(query.dtype) @ value

    device._bf16_is_right.cache_clear()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", leaking)
    with pytest.raises(ConfigError, match="gets it wrong"):
        device.autocast(torch.device("cpu"), "bf16")
    device._bf16_is_right.cache_clear()


def test_auto_takes_bf16_only_where_it_is_faster(monkeypatch):
    for faster in (True, False):
        monkeypatch.setattr(device, "_bf16_is_faster", lambda _, faster=faster: faster)
        with device.autocast(torch.device("cpu"), "auto"):
            assert torch.is_autocast_enabled("cpu") is faster


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="--precision fp8: allowed are float32, bf16 and auto"):
        device.autocast(torch.device("cpu"), "fp8")


def test_full_precision_is_given_back_after_an_error():
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), device.full_precision(torch.device("cpu")):
        raise ZeroDivisionError
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_a_precision_that_was_inherited_is_inherited_again():
    settings = torch.backends
    before = settings.fp32_precision
    try:
        settings.cuda.matmul.fp32_precision = "none"  # another test may have set it
        settings.fp32_precision = "tf32"
        with device.full_precision(torch.device("cpu")):
            assert settings.cuda.matmul.fp32_precision == "ieee"
        assert settings.cuda.matmul.fp32_precision == "tf32"
        settings.fp32_precision = "ieee"
        assert settings.cuda.matmul.fp32_precision == "ieee"
    finally:
        settings.fp32_precision = before


def test_threads_do_not_see_each_others_settings():
    """One is in full precision while another comes and goes; with a setting that has to be changed and given back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    seen = []

    def products():
        for _ in range(200):
            with device.full_precision(torch.device("cpu")):
                seen.append(torch.backends.cuda.matmul.fp32_precision)

    try:
        threads = [threading.Thread(target=products) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(seen) == {"ieee"}
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_library_imports_without_a_device():
    done = subprocess.run(
        [sys.executable, "-c", "import gradwire.device, gradwire; gradwire.TopK(); print('in')"],
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "in", done.stderr
