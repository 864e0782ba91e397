"""Compressors, one file each; a new one is one file and one line in COMPRESSORS."""

from commopt.compress.base import Compressor
from commopt.compress.cast import Cast
from commopt.compress.dgc import DGC
from commopt.compress.exact import Exact
from commopt.compress.onebit import OneBit
from commopt.compress.quantize import Quantize
from commopt.kernels.codec import Dice, ErrorFeedback, Momentum, Velocity

COMPRESSORS: dict[str, type[Compressor]] = {"cast": Cast, "quantize": Quantize, "onebit": OneBit, "dgc": DGC}

__all__ = [
    "COMPRESSORS",
    "DGC",
    "Cast",
    "Compressor",
    "Dice",
    "ErrorFeedback",
    "Exact",
    "Momentum",
    "OneBit",
    "Quantize",
    "Velocity",
]
