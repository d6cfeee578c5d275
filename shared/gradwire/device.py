"""Which device, what it can do, and the one road from device to host.

Everything that differs between devices is here; nowhere else does code ask for a device type. What a device can do is
found out by trying the operation once, and the answer is kept.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from gradwire.errors import ConfigError


def pick(name: str = "auto") -> torch.device:
    """The device called `name`: auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:N or mps.

    Raises ConfigError if it is not there, or can't do float32 arithmetic.
    """
    if name == "auto":
        return next(torch.device(kind) for kind in ("cuda", "mps", "cpu") if _works(kind))
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"--device {name}: allowed are auto, cpu, cuda, cuda:N and mps")
    if not _works(name):
        raise ConfigError(f"--device {name}: PyTorch {torch.__version__} finds no such device; try --device auto")
    return torch.device(name)


@functools.cache
def _works(name: str) -> bool:
    try:
        return float((torch.ones(2, device=name) + 1).sum().cpu()) == 4.0
    except (RuntimeError, AssertionError):  # torch raises either where a backend isn't built in
        return False


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """What a model's forward pass runs in: bf16 where `precision` is bf16, or auto and the device is faster with it.

    Weights stay float32. Raises ConfigError for bf16 on a device that gets it wrong, and for any other word.
    """
    if precision not in ("float32", "bf16", "auto"):
        raise ConfigError(f"--precision {precision}: allowed are float32, bf16 and auto")
    enabled = precision != "float32" and _bf16_is_right(device)
    if precision == "bf16" and not enabled:
        raise ConfigError(f"--precision bf16: {describe(device)} lacks it, or gets it wrong; try --precision auto")
    if precision == "auto":
        enabled = enabled and _bf16_is_faster(device)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


@functools.cache
def _bf16_is_right(device: torch.device) -> bool:
    """Whether a product and causal attention in bf16 are those in float32, but for rounding (pytorch #195910)."""
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    future = torch.ones(64, 64, dtype=torch.bool).triu(1).to(device)
    attention = (x @ x.transpose(2, 3) / 8).masked_fill(future, -1e9).softmax(-1) @ x
    try:
        half = x.to(torch.bfloat16)
        pairs = (half @ half, x @ x), (F.scaled_dot_product_attention(half, half, half, is_causal=True), attention)
        return all(float((a.to(torch.float32) - b).abs().max()) < 0.05 * float(b.abs().max()) for a, b in pairs)
    except (RuntimeError, TypeError):  # MPS refuses a dtype with the latter
        return False


@functools.cache
def _bf16_is_faster(device: torch.device) -> bool:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(device)
    return 1.2 * _seconds(x.to(torch.bfloat16)) < _seconds(x)


def _seconds(matrix: torch.Tensor) -> float:
    """The best of a few products."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        synchronize(matrix.device)
        times.append(time.perf_counter() - start)
    return min(times)


def describe(device: torch.device) -> str:
    """The device in words, such as `cuda (NVIDIA L4)`."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({platform.machine()})"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, contiguous, dtype unchanged: itself where it is both already, else a copy.

    Synchronous and without conversion, because asynchronous and converting copies have been wrong on MPS; what needs
    another dtype converts afterwards, on the host.
    """
    return tensor.detach().contiguous().cpu()


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products of float32 tensors are float32 in here, whatever autocast or TF32 says outside.

    The settings of PyTorch are the process's: while one thread is in here, others that would have to change them wait.
    """
    with torch.autocast(device.type, enabled=False), _precision:
        lowered = [each for each in _products() if each.fp32_precision not in ("none", "ieee")]
        before = [each.fp32_precision for each in lowered]
        try:
            for each in lowered:
                each.fp32_precision = "ieee"
            yield
        finally:
            for each, precision in zip(lowered, before, strict=True):
                # What was inherited is inherited again, and not pinned.
                each.fp32_precision = "none" if precision == _backends().fp32_precision else precision


_precision = threading.RLock()


def _products() -> tuple[Any, ...]:
    return _backends().cuda.matmul, _backends().mkldnn.matmul


def _backends() -> Any:
    return torch.backends  # whose settings type checkers don't know


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all it was given, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
