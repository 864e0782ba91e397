"""What NCCL is told about the communicator of one level of the network: how much of the GPU it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import distributed_c10d as c10d

from commopt.errors import ConfigurationError

LEVELS = ("world", "intra", "inter")

_LARGEST_CLUSTER = 8  # thread blocks that may be scheduled together on every GPU that knows such clusters


@dataclass(frozen=True)
class NcclOptions:
    """Limits of one communicator, as NCCL's ncclConfig_t has them; None leaves a choice to NCCL.

    min_ctas, max_ctas: thread blocks that a kernel of NCCL may use, 1 or more. Fewer leave more of the GPU to backward
        and move data more slowly; a level across a slow network is served by few.
    cga_cluster_size: thread blocks of a cluster, 0 (no clusters) to 8.

    Raises ConfigurationError for values that cannot be.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("min_ctas", 1), ("max_ctas", 1), ("cga_cluster_size", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigurationError(f"NcclOptions({name}={value!r}) must be a whole number, {least} or more")
        if self.cga_cluster_size is not None and self.cga_cluster_size > _LARGEST_CLUSTER:
            raise ConfigurationError(
                f"NcclOptions(cga_cluster_size={self.cga_cluster_size}) is more than the {_LARGEST_CLUSTER} thread "
                f"blocks of a cluster; use 0 to {_LARGEST_CLUSTER}"
            )
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ConfigurationError(
                f"NcclOptions(min_ctas={self.min_ctas}, max_ctas={self.max_ctas}) leaves nothing between; make "
                f"max_ctas at least min_ctas"
            )

    def for_torch(self) -> Any:
        """Return new options of torch for one process group. Raises AttributeError where its NCCL has no such."""
        options = c10d.ProcessGroupNCCL.Options()  # of a torch with NCCL only
        for name, value in self._given().items():
            setattr(options.config, name, value)
        return options

    def missing_in_torch(self) -> list[str]:
        """Return the names of what is given here and the NCCL of this torch does not have."""
        config = c10d.ProcessGroupNCCL.Options().config
        return [name for name in self._given() if not hasattr(config, name)]

    def _given(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if value is not None}


NcclByLevel = Mapping[str, NcclOptions]


def missing_in_torch(nccl: NcclByLevel) -> list[str]:
    """Return the names of all that is given for some level and the NCCL of this torch does not have."""
    return sorted({name for options in nccl.values() for name in options.missing_in_torch()})


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
