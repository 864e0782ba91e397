"""Every kernel in plain torch: the path of CPU tensors, the oracle of the tests, the last resort on a GPU."""

from commopt.kernels.reference.blocks import accumulate, decode, encode, finite, recode
from commopt.kernels.reference.pack import pack, unpack
from commopt.kernels.reference.residual import round_with_carry
from commopt.kernels.reference.velocity import advance

__all__ = ["accumulate", "advance", "decode", "encode", "finite", "pack", "recode", "round_with_carry", "unpack"]
