"""Collectives without DDP, for torch, NumPy and CuPy arrays."""

from commopt.collectives.communicator import Communicator, all_reduce
from commopt.collectives.work import Work

__all__ = ["Communicator", "Work", "all_reduce"]
