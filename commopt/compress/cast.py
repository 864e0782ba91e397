"""Half the bytes: travel in a 16-bit floating-point format, add up in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commopt.compress.plain import Plain
from commopt.errors import ConfigurationError


@dataclass(frozen=True, repr=False)
class Cast(Plain):
    """Round to bfloat16 or float16 for the wire.

    bfloat16 keeps float32's range and 8 bits of precision; float16 keeps 11 bits and overflows to inf above 65504,
    which every rank then sees.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigurationError(f"Cast({self.dtype}) is not a 16-bit format; use torch.bfloat16 or torch.float16")

    @property
    def wire_dtype(self) -> torch.dtype:
        """See Plain."""
        return self.dtype
