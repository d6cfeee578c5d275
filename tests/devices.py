"""The kinds of device that a test can run on, and a stand-in for the one that CI has not got: Apple's MPS.

    @pytest.mark.parametrize("kind", devices.KINDS)
    def test_something(kind):
        with kind.running():
            something(torch.ones(3, device=kind.device))

Within the stand-in host and device are both the CPU. On the host is what comes by `cpu()`, `to("cpu")`, a factory
without a `device` or from numpy, and whatever is computed from such alone; `to(torch.device("cpu"))` puts a tensor on
the device, where everything else is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CAT_ELEMENTS: Final = 2**31

NO_FLOAT64: Final = "there is no float64"
NO_COMPLEX: Final = "there are no complex numbers, and no FFT, in older releases"
NO_BF16: Final = "there is no bfloat16 before macOS 14"
UNSIGNED: Final = "arithmetic on wide unsigned integers gives garbage (pytorch #176296)"
STRIDED: Final = "strided input gives wrong results or corrupts memory (pytorch #175187, #183419)"
TOP_NONE: Final = "k = 0 aborts the process (pytorch #91878)"
TOP_DIMENSIONS: Final = "more than four dimensions abort the process (pytorch #154890)"
CAT_MIXED: Final = "inputs that are not of one dtype give wrong results (pytorch #189965)"
CAT_LARGE: Final = "a result of more than 2^31 elements is wrong (pytorch #189960)"
OFFSET: Final = "a write into a slice with an offset can do nothing (pytorch #163327)"
NON_BLOCKING: Final = "a non-blocking copy corrupts (pytorch #189690, #139550)"
CONVERTING: Final = "a copy between devices that also converts can overwrite its source (pytorch #189563)"
NOT_FETCHED: Final = "the tensor is on the device: fetch it with cpu() first"
TWO_PLACES: Final = "one tensor is on the host, another on the device"
COLLECTIVE: Final = "gloo has no MPS: what crosses the network goes through the host"

LACKING: Final[Mapping[torch.dtype, str]] = {
    torch.float64: NO_FLOAT64,
    torch.complex32: NO_COMPLEX,
    torch.complex64: NO_COMPLEX,
    torch.complex128: NO_COMPLEX,
    torch.uint16: UNSIGNED,
    torch.uint32: UNSIGNED,
    torch.uint64: UNSIGNED,
}
SCATTERS: Final = frozenset({"scatter", "scatter_add", "scatter_reduce"})
ROW_WRITES: Final = frozenset({"index_copy_", "index_add_", "index_put_"})
FACTORIES: Final = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint,
     torch.randn, torch.randperm, torch.tensor, torch.zeros}
)  # fmt: skip
CONTIGUOUS_ONLY: Final = frozenset({"sort", "argsort", "topk", "isfinite", "isnan", "isinf", "gather"})


class RefusedByMps(Exception):
    """Says which op, and why MPS would not do it, or not rightly."""


class DtypeRefused(RefusedByMps, TypeError):
    """As MPS says of a dtype that it lacks."""


class OpRefused(RefusedByMps, RuntimeError):
    """Everything else."""


class LikeMps(AbstractContextManager[None]):
    """Within it, in this thread, CPU tensors are refused what MPS lacks or gets wrong; no value is changed.

    Raises RefusedByMps from the op itself. `strict_bf16` refuses bfloat16 too, as macOS 13 does.
    """

    def __init__(self, strict_bf16: bool = False) -> None:
        lacking = {**LACKING, torch.bfloat16: NO_BF16} if strict_bf16 else LACKING
        host = _Host()
        self._ops, self._calls = _Ops(lacking, host), _Calls(lacking, host)

    def __enter__(self) -> None:
        self._ops.__enter__()
        self._calls.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.__exit__(kind, error, trace)
        self._ops.__exit__(kind, error, trace)


@dataclass(frozen=True)
class Kind:
    """A kind of device: where a test's tensors go, and what to run it within."""

    name: str
    device: torch.device
    mode: Callable[[], AbstractContextManager[None]] = nullcontext

    def running(self) -> AbstractContextManager[None]:
        return self.mode()


STRICT: Final = functools.partial(LikeMps, strict_bf16=True)
HAS_CUDA: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
HAS_MPS: Final = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="no Apple GPU here")
KINDS: Final[list[pytest.ParameterSet]] = [
    pytest.param(Kind("cpu", torch.device("cpu")), id="cpu"),
    pytest.param(Kind("mps-stand-in", torch.device("cpu"), LikeMps), id="mps-stand-in"),
    pytest.param(Kind("mps-stand-in-strict", torch.device("cpu"), STRICT), id="mps-stand-in-strict"),
    pytest.param(Kind("cuda", torch.device("cuda")), id="cuda", marks=[pytest.mark.cuda, HAS_CUDA]),
    pytest.param(Kind("mps", torch.device("mps")), id="mps", marks=[pytest.mark.mps, HAS_MPS]),
]


class _Host:
    """The storages that count as the host's."""

    def __init__(self) -> None:
        # Held, so that no other storage can come to the same address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._purge_at = 1000

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def take(self, values: Any) -> None:
        for each in tree_leaves(values):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = storage
        if len(self._storages) > self._purge_at:
            used = torch._C._storage_Use_Count
            self._storages = {at: each for at, each in self._storages.items() if used(at) > 1}
            self._purge_at = 1000 + 2 * len(self._storages)


class _Ops(TorchDispatchMode):
    """Sees the ops that run, those of the backward pass and of optimizers among them."""

    def __init__(self, lacking: Mapping[torch.dtype, str], host: _Host) -> None:
        super().__init__()
        self._lacking = lacking
        self._host = host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # in inference mode these arrive whole, and would hide what they do
            with self:
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_host = [self._host.holds(each) for each in tensors]
        if (tensors and all(on_host)) or name == "lift_fresh":  # by which numbers come from Python
            result = func(*args, **kwargs)
            self._host.take(result)
            return result
        large = {at for each, at in zip(tensors, on_host, strict=True) if each.dim()}
        if len(large) > 1 and name != "copy_":
            _refuse(name, iter([TWO_PLACES]))
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        _check_dtypes(name, given, self._lacking)
        _refuse(name, _op_reasons(func.namespace, name, given))
        result = func(*args, **kwargs)
        _check_dtypes(name, result, self._lacking)
        return result


class _Calls(TorchFunctionMode):
    """Sees the calls that are made, which may come to no op on one device, or to others than on MPS.

    It is off within a call that it sees, such as `backward`: of what hooks do there, only _Ops tells.
    """

    def __init__(self, lacking: Mapping[torch.dtype, str], host: _Host) -> None:
        super().__init__()
        self._lacking = lacking
        self._host = host

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__):
            with _disable_current_modes():  # printing uses float64 for what is on the CPU, and not for MPS
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if func is torch.Tensor.numpy and not self._host.holds(args[0]):
            _refuse(name, iter([NOT_FETCHED]))
        moves = func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)
        if moves and not self._host.holds(args[0]):
            _check_dtypes(name, args[:1], self._lacking)
        _refuse(name, _call_reasons(func, name, args, kwargs))
        result = func(*args, **kwargs)
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and _names_a_device(*args, **kwargs)):
            with _disable_current_modes():  # the copy that it would be
                result = result.clone() if result is args[0] else result
            if func is torch.Tensor.cpu or "cpu" in (*args[1:2], kwargs.get("device")):
                self._host.take(result)
        if func in FACTORIES and kwargs.get("device") in (None, "cpu"):
            self._host.take(result)
        return result


def _refuse(name: str, reasons: Iterator[str], kind: type[RefusedByMps] = OpRefused) -> None:
    reason = next(reasons, None)
    if reason is not None:
        raise kind(f"{name}: {reason}")


def _check_dtypes(name: str, values: Any, lacking: Mapping[torch.dtype, str]) -> None:
    found = {each.dtype for each in tree_leaves(values) if isinstance(each, torch.Tensor)}
    _refuse(name, (f"{dtype}: {reason}" for dtype, reason in lacking.items() if dtype in found), DtypeRefused)


def _op_reasons(namespace: str, name: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Why an op is refused; `given` is its arguments by the names in its schema."""
    if namespace in ("c10d", "_c10d_functional"):
        yield COLLECTIVE
    is_scatter = name.removesuffix("_") in SCATTERS
    if given.get("non_blocking"):
        yield NON_BLOCKING
    if name.startswith("_fft_"):
        yield NO_COMPLEX
    if (is_scatter or name in CONTIGUOUS_ONLY) and not given["self"].is_contiguous():
        yield STRIDED
    if name == "topk" and given["k"] == 0:
        yield TOP_NONE
    if name == "topk" and given["self"].dim() > 4:
        yield TOP_DIMENSIONS
    if (name in ROW_WRITES or (is_scatter and name.endswith("_"))) and given["self"].storage_offset():
        yield OFFSET
    if name in ("cat", "stack"):  # MPS stacks by cat
        yield from _cat_reasons(given["tensors"])


def _cat_reasons(tensors: list[torch.Tensor]) -> Iterator[str]:
    if len({each.dtype for each in tensors}) > 1:
        yield CAT_MIXED
    if sum(each.numel() for each in tensors) > CAT_ELEMENTS:
        yield CAT_LARGE


def _call_reasons(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Why a call is refused, where its ops would not tell."""
    if kwargs.get("non_blocking") or (func is torch.Tensor.cuda and True in args[2:3]):
        yield NON_BLOCKING
    if func is torch.Tensor.to:
        yield from _to_reasons(*args, **kwargs)
    if name in ("isfinite", "argsort"):  # other ops by the time they run
        tensor = args[0] if args else kwargs["input"]
        if not tensor.is_contiguous():
            yield STRIDED
    if name.startswith("fft_"):
        yield NO_COMPLEX


def _parsed(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """(device, dtype, non_blocking, memory format) of the arguments of `to`."""
    kwargs.pop("copy", None)  # which the parser of `to` does not take, nor in its place
    copy_at = 3 if args and not isinstance(args[0], torch.dtype | torch.Tensor) else 2
    return tuple(torch._C._nn._parse_to(*args[:copy_at], **kwargs))


def _names_a_device(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return _parsed(*args, **kwargs)[0] is not None


def _to_reasons(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Iterator[str]:
    device, dtype, non_blocking, _ = _parsed(*args, **kwargs)
    if non_blocking:
        yield NON_BLOCKING
    if device is not None and dtype not in (None, tensor.dtype):
        yield CONVERTING


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an op is made of others on the CPU, with no kernel of its own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")
