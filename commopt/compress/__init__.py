# SPDX-License-Identifier: Apache-2.0
"""Compressors, one file each; a new one is one file and one line in COMPRESSORS."""

from commopt.compress.base import Candidates, Compressor, KernelCost
from commopt.compress.dgc import DGC
from commopt.compress.onebit import OneBit
from commopt.compress.plain import Cast, Exact, Plain
from commopt.compress.quantize import Blockwise, Quantize
from commopt.kernels.codec import Encoding, ErrorFeedback, RngKey

COMPRESSORS: dict[str, type[Compressor]] = {"cast": Cast, "quantize": Quantize, "onebit": OneBit, "dgc": DGC}

__all__ = [
    "COMPRESSORS",
    "DGC",
    "Blockwise",
    "Candidates",
    "Cast",
    "Compressor",
    "Encoding",
    "ErrorFeedback",
    "Exact",
    "KernelCost",
    "OneBit",
    "Plain",
    "Quantize",
    "RngKey",
]
