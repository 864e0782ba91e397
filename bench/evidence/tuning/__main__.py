# SPDX-License-Identifier: Apache-2.0
"""Let commopt tune itself, and compare its choice with the fastest of all choices, found by trying every one.

    python -m bench.cluster --nodes 2 --ranks-per-node 2 --rate 100mbit \\
        -m bench.evidence.tuning --allow lossless,quantized
    python -m bench.evidence.tuning.report out.json

Every preset of the allowed families trains with DDP's buckets and, where it could win by that, with adaptive ones. A
fresh model with "auto" then trains until it is tuned. In the end the tuned model, the fastest of the others, stock DDP
and one that does not communicate take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch.distributed as dist

import commopt
from bench.environment import run_of
from bench.evidence.matrix import World
from bench.evidence.models import MODELS, subject
from bench.evidence.tuning import report
from bench.evidence.tuning.comparison import compare
from commopt import ConfigurationError
from commopt.command_line import CommandParser, number, output_file, whole
from commopt.groups import join
from examples.train_gpt import progress_bar, start_process_group

# The strengths that stay within the tuner's own limit of error when all gradients go by them.
_STRENGTHS = {
    "lossless": ("flat",),
    "bf16": ("hierarchical_bf16",),
    "quantized": ("quantized", "quantized:bits=4"),
    "onebit": ("onebit",),
    "dgc": ("dgc:density=0.05", "dgc:density=0.01"),
    "powersgd": tuple(f"powersgd:matrix_rank={rank}:start_step=0" for rank in (16, 8, 4)),
}
FAMILIES = tuple(_STRENGTHS)
_HIERARCHICAL = {"flat": "hierarchical"}


def candidates(allow: Sequence[str], *, two_levels: bool) -> list[str]:
    """Return the presets of the allowed families, "lossless" always among them.

    two_levels: whether nodes have several ranks; with one each hierarchical is the same as flat, and left out.
    Raises ConfigurationError for a family that does not exist.
    """
    unknown = [family for family in allow if family not in FAMILIES]
    if unknown:
        raise ConfigurationError(f"--allow {unknown[0]} is no family; name some of {', '.join(FAMILIES)}")
    found: list[str] = []
    for family in FAMILIES:
        if family != "lossless" and family not in allow:
            continue
        for text in _STRENGTHS[family]:
            found.append(text)
            if two_levels and not text.startswith("hierarchical"):
                found.append(_HIERARCHICAL.get(text, f"hierarchical_{text}"))
    return found


def parse_options() -> argparse.Namespace:
    """Read the command line; a wrong one ends here, before anything is started."""
    parser = CommandParser(prog="python -m bench.evidence.tuning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gpt", metavar="NAME[:OPTION=VALUE]", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--allow",
        type=lambda text: text.split(","),
        default=["lossless", "quantized"],
        metavar="FAMILY[,FAMILY...]",
        help=f"of {', '.join(FAMILIES)} (default lossless,quantized)",
    )
    parser.add_argument(
        "--candidates",
        type=lambda text: text.split(","),
        metavar="NAME[:OPTION=VALUE][,NAME...]",
        help="the only presets to try (default: all of the families, at every strength within the tuner's limit)",
    )
    parser.add_argument("--seconds", type=number(), default=2.0, help="of timed steps for each candidate (default 2)")
    parser.add_argument("--most-steps", type=whole(1), default=60, help="for the tuner (default 60)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="append JSON lines")
    options = parser.parse_args()
    try:
        options.subject = subject(options.model)
        for name in options.candidates or candidates(options.allow, two_levels=True):
            commopt.build_preset(name)
    except commopt.ConfigurationError as error:
        parser.error(str(error))
    return options


def main() -> None:
    """Search, tune and compare; rank 0 reports."""
    options = parse_options()
    start_process_group()
    nodes = [len(node) for node in join(None).cluster.nodes]
    with progress_bar() as show:
        found = compare(
            options.subject,
            options.allow,
            options.candidates or candidates(options.allow, two_levels=1 < len(nodes) < sum(nodes)),
            seconds=options.seconds,
            most_steps=options.most_steps,
            show=lambda message: show(0.0, message),
        )
    if dist.get_rank() == 0:
        environment = World(**run_of("bench.evidence.tuning"), nodes=nodes)
        if options.json:
            report.append(options.json, environment, [found])
        print(report.markdown([(environment, [found])]))
        print(found.explanation)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
