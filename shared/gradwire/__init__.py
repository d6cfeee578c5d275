"""gradwire: train one PyTorch model on machines that share only an ordinary network.

The names below are loaded when they are first used, so that a command that needs no PyTorch doesn't wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.codec import Dense, TopK
    from gradwire.errors import GradwireError
    from gradwire.optim.demo import DeMo
    from gradwire.optim.distributed import DistributedOptimizer
    from gradwire.optim.sparseloco import SparseLoCo
    from gradwire.session import Session, connect

_HOMES = {
    "DeMo": "gradwire.optim.demo",
    "Dense": "gradwire.codec",
    "DistributedOptimizer": "gradwire.optim.distributed",
    "GradwireError": "gradwire.errors",
    "Session": "gradwire.session",
    "SparseLoCo": "gradwire.optim.sparseloco",
    "TopK": "gradwire.codec",
    "connect": "gradwire.session",
}

__all__ = ["DeMo", "Dense", "DistributedOptimizer", "GradwireError", "Session", "SparseLoCo", "TopK", "connect"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
