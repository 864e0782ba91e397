"""What the kernels of low-rank factors agree on."""

from __future__ import annotations

import torch

RIDGE = 100 * torch.finfo(torch.float32).eps
"""What a Gram matrix gets on its diagonal, as a share of the mean there: less than roundings can take away from it."""

NOISE = 1e-6
"""Standard deviation of what is added to a factor whose largest element is 1: no direction may ever be lost."""

MAX_KERNEL_RANK = 32
"""The most columns that a CUDA kernel takes; the reference takes any number."""
