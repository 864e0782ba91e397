"""Typed wrappers of the GPU kernels, one module each; on other devices plain torch computes the same."""

from commopt.kernels.pack import pack, unpack

__all__ = ["pack", "unpack"]
