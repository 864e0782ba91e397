# SPDX-License-Identifier: Apache-2.0
"""What NCCL is told about the communicator of one level of the network: how much of the GPU it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import distributed_c10d as c10d

from commopt.errors import ConfigurationError

LEVELS = ("world", "intra", "inter")


@dataclass(frozen=True)
class NcclOptions:
    """Limits of one communicator, as NCCL's ncclConfig_t has them; None leaves a choice to NCCL.

    max_ctas: thread blocks that a kernel of NCCL may use, 1 or more. Fewer leave more of the GPU to backward and move
        data more slowly; a level across a slow network is served by few.

    Raises ConfigurationError for values that cannot be.
    """

    max_ctas: int | None = None

    def __post_init__(self) -> None:
        value = self.max_ctas
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigurationError(f"NcclOptions(max_ctas={value!r}) must be a whole number, 1 or more")

    def for_torch(self) -> Any:
        """Return new options of torch for one process group."""
        options = c10d.ProcessGroupNCCL.Options()  # of a torch with NCCL only
        if self.max_ctas is not None:
            options.config.max_ctas = self.max_ctas
        return options


NcclByLevel = Mapping[str, NcclOptions]


def copied_options(nccl: NcclByLevel | None) -> dict[str, NcclOptions]:
    """Return options that the caller cannot change any more; raises ConfigurationError for other types."""
    if nccl is None:
        return {}
    if not isinstance(nccl, Mapping):
        raise ConfigurationError(f'nccl={nccl!r} names no level; pass for example {{"inter": NcclOptions(max_ctas=4)}}')
    for level, options in nccl.items():
        if not isinstance(options, NcclOptions):
            raise ConfigurationError(
                f"nccl[{level!r}] is a {type(options).__name__}; pass for example commopt.NcclOptions(max_ctas=4)"
            )
    return dict(nccl)


def require_nccl_options(nccl: NcclByLevel, backends: Mapping[str, str]) -> None:
    """Raise ConfigurationError unless all options are for a level there can be, of a group that NCCL serves."""
    for level in nccl:
        if level not in LEVELS:
            raise ConfigurationError(f"nccl has options for {level!r}; the levels are {', '.join(LEVELS)}")
    if nccl and "nccl" not in backends.values():
        raise ConfigurationError(
            f"nccl={dict(nccl)} is for NCCL, and the process group has the backends {dict(backends)}; leave it out, or "
            f"start with init_process_group('nccl')"
        )
