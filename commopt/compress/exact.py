"""float32 as it is, for what should travel uncompressed in the same message."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commopt.compress.plain import Plain


@dataclass(frozen=True, repr=False)
class Exact(Plain):
    """Send float32: aggregators use it for dense tensors beside compressed ones. It leaves nothing to a carry."""

    @property
    def wire_dtype(self) -> torch.dtype:
        """See Plain."""
        return torch.float32
