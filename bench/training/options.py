"""The command line of the training benchmark."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import bench.training
from bench.models import add_options
from bench.training.contenders import KNOWN, require_known, split_strategies
from commopt.command_line import Parser, number, output_file, whole

DEFAULT_STRATEGIES = (
    "ddp",
    "hierarchical",
    "hierarchical_bf16",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_onebit",
    "hierarchical_dgc:density=0.01",
    "hierarchical_powersgd",
)


def add_strategies(parser: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    """Add what chooses the contenders."""
    parser.add_argument(
        "--strategies",
        type=split_strategies,
        default=list(default),
        metavar="NAME[:OPTION=VALUE][,NAME...]",
        help=f"of {', '.join(KNOWN)} (default: {','.join(default)})",
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add what chooses the buckets."""
    parser.add_argument(
        "--plan",
        choices=("ddp", "adaptive"),
        default="ddp",
        help="of the buckets: DDP's own, so that strategies alone differ (default), or adaptive",
    )


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started."""
    parser = Parser(prog="python -m bench.training", description=(bench.training.__doc__ or "").splitlines()[0])
    add_strategies(parser, DEFAULT_STRATEGIES)
    parser.add_argument("--seconds", type=number(), default=25.0, help="for each strategy (default 25)")
    parser.add_argument("--look-every", type=number(), default=5.0, metavar="S", help="evaluate so often (default 5 s)")
    parser.add_argument("--target-loss", type=number(), metavar="X", help="report the seconds to this held-out loss")
    add_plan(parser)
    parser.add_argument("--noop-steps", type=whole(0), default=30, help="steps without communication (default 30)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then strategies"
    )
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    add_options(parser)
    options = parser.parse_args()
    try:
        for name in options.strategies:
            require_known(name)
    except ValueError as error:
        parser.error(str(error))
    if options.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    return options
