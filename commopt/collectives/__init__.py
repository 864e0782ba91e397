# SPDX-License-Identifier: Apache-2.0
"""Collectives without DDP, for torch, NumPy and CuPy arrays."""

from commopt.collectives.communicator import Communicator, Work, all_reduce

__all__ = ["Communicator", "Work", "all_reduce"]
