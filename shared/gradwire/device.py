"""Which device, what it can do, and the one road from device to host.

Everything that differs between devices is here; nowhere else does code ask for a device type. What a device can do is
found out by trying the operation once, and the answer is kept.
"""

from __future__ import annotations

import functools
import platform

import torch

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


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all it was given, so that a clock read next tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
