"""The command line: flags of nccl-tests, and ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from commopt.bandwidth.collective import COLLECTIVES, Collective
from commopt.bandwidth.contenders import TORCH, find_aggregator, known_aggregators
from commopt.collectives.communicator import Op
from commopt.command_line import parse_nbytes
from commopt.errors import ConfigurationError

DTYPES: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
COMMOPT = "commopt"


@dataclass(frozen=True)
class Settings:
    """What to measure; all ranks must have the same."""

    min_nbytes: int
    max_nbytes: int
    step_factor: int
    step_nbytes: int
    iterations: int
    warm_up_iterations: int
    check: bool
    type_name: str
    op: Op
    collective: Collective
    contenders: tuple[str, ...]
    ranks_per_node: int | None
    json: Path | None

    @property
    def dtype(self) -> torch.dtype:
        """The elements' type."""
        return DTYPES[self.type_name]

    def steps_nbytes(self) -> Iterator[int]:
        """Yield every size of the sweep, as nccl-tests steps: times `-f` when that is above 1, else plus `-i`."""
        nbytes = self.min_nbytes
        while nbytes <= self.max_nbytes:
            yield nbytes
            nbytes = nbytes * self.step_factor if self.step_factor > 1 else nbytes + self.step_nbytes


def settings_of(options: argparse.Namespace) -> Settings:
    """Check the options of a command line; raises ConfigurationError."""
    collective = COLLECTIVES[options.collective]
    default = "hierarchical" if collective.aggregates else COMMOPT
    settings = Settings(
        min_nbytes=parse_nbytes(options.min_nbytes),
        max_nbytes=parse_nbytes(options.max_nbytes),
        step_factor=options.step_factor,
        step_nbytes=parse_nbytes(options.step_nbytes),
        iterations=options.iterations,
        warm_up_iterations=options.warm_up_iterations,
        check=bool(options.check),
        type_name=options.datatype,
        op=options.op,
        collective=collective,
        contenders=tuple(dict.fromkeys((options.aggregator or default).split(","))),
        ranks_per_node=options.ranks_per_node,
        json=options.json,
    )
    _require_sensible(settings)
    _require_contenders(settings)
    return settings


def _require_sensible(settings: Settings) -> None:
    minima = (
        ("-b", settings.min_nbytes, 1),
        ("-i", settings.step_nbytes, 1),
    )
    for flag, value, minimum in minima:
        if value < minimum:
            raise ConfigurationError(f"{flag} {value} is too small; the least is {minimum}")
    if settings.min_nbytes > settings.max_nbytes:
        raise ConfigurationError(
            f"-b {settings.min_nbytes} is more than -e {settings.max_nbytes} bytes; raise -e or lower -b"
        )
    if settings.collective.reduces and settings.op == "avg" and not settings.dtype.is_floating_point:
        raise ConfigurationError(f"-o avg of -d {settings.type_name} is no integer; use -o sum")


def _require_contenders(settings: Settings) -> None:
    aggregates = settings.collective.aggregates
    known = (TORCH, *sorted(known_aggregators())) if aggregates else (TORCH, COMMOPT)
    for name in settings.contenders:
        aggregator = find_aggregator(name) if aggregates else None
        if name not in known and aggregator is None:
            raise ConfigurationError(
                f"--aggregator {name!r} is unknown for {settings.collective.name}; known: {', '.join(known)}"
            )
        if aggregator is not None and not aggregator.lossless and not settings.dtype.is_floating_point:
            raise ConfigurationError(
                f"--aggregator {name} would round -d {settings.type_name}; use a floating-point type or a lossless "
                f"aggregator such as flat"
            )
