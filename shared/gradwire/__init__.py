"""gradwire: train one PyTorch model on machines that share only an ordinary network."""

from gradwire.codec import Dense, TopK
from gradwire.errors import GradwireError
from gradwire.optim.distributed import DistributedOptimizer
from gradwire.optim.sparseloco import SparseLoCo
from gradwire.session import Session, connect

__all__ = ["Dense", "DistributedOptimizer", "GradwireError", "Session", "SparseLoCo", "TopK", "connect"]
