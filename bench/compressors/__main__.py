# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.compressors --help`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

import bench.compressors
from bench.compressors.baselines import METHODS, empty_all_reduce_us, in_rounds, method_of, world_of_one
from bench.compressors.measure import Failure, Measurement, TooSlowError, markdown, measure, print_table, write
from bench.compressors.methods import RANKS_PER_NODE, Gradients, Method, layouts_of, without_replay
from bench.environment import machine
from commopt import ConfigurationError
from commopt.command_line import CommandParser, content_of, number, output_file, whole
from commopt.kernels.loader import loader_for

_IN_A_CALLBACK = "Got the following error when running the callback: "  # torch's, once for each that it goes through
_MODELS = ("resnet50", "bert-large", "gpt2-medium")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(
        prog="python -m bench.compressors", description=(bench.compressors.__doc__ or "").splitlines()[0]
    )
    models, names = ",".join(_MODELS), ",".join(METHODS)
    parser.add_argument("--models", default=models, metavar="NAMES", help=f"of commopt.simulate (default {models})")
    parser.add_argument("--strategies", default=names, metavar="NAMES", help=f"presets and torch's hooks: {names}")
    parser.add_argument("--steps", type=whole(1), default=10, help="that count (default 10)")
    parser.add_argument("--seconds", type=number(), default=4.0, help="for one strategy on one model (default 4)")
    both = "whether presets replay CUDA graphs (default: on a GPU both)"
    parser.add_argument("--replay", choices=("on", "off", "both"), help=both)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then steps"
    )
    parser.add_argument(
        "--show", type=content_of(markdown), metavar="FILE", help="print a table of such a file instead"
    )
    options = parser.parse_args()
    try:
        options.layouts = {name: layouts_of(name) for name in options.models.split(",")}
        methods = [method_of(name) for name in options.strategies.split(",")]
    except ConfigurationError as error:
        parser.error(str(error))
    replay = options.replay or ("both" if options.device == "cuda" else "on")
    options.methods = [variant for method in methods for variant in variants(method, replay)]
    return options


def variants(method: Method, replay: str) -> list[Method]:
    """Return a method as it is, without replay of CUDA graphs, or in both ways; torch's hooks once."""
    if method.replay is None:
        return [method]
    found = {"on": [method], "off": [without_replay(method)]}
    return found.get(replay) or [*found["on"], *found["off"]]


def measure_model(
    gradients: Gradients, methods: Sequence[Method], steps: int, limit_s: float
) -> Iterator[Measurement | Failure]:
    """Yield what each method takes on one model; one that cannot run says why, and the others follow."""
    for each in methods:
        print(f"{gradients.model}: {each.label}", file=sys.stderr, flush=True)
        try:
            yield measure(each, gradients, steps, limit_s)
        except TooSlowError as error:
            yield Failure(gradients.model, each.label, f"{error}; give it more than --seconds {limit_s:g}")
        except Exception as error:  # whatever it is
            what = next(iter(str(error).splitlines()), "").rpartition(_IN_A_CALLBACK)[2]  # a stack of calls follows
            yield Failure(gradients.model, each.label, f"{type(error).__name__}: {what}")


def main() -> None:
    """Measure, write and print the figures: of what has a target on all models first, then of the rest."""
    options = parse_options()
    if options.show:
        print(options.show)
        return
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    found: list[Measurement] = []
    failed: list[Failure] = []
    with world_of_one(device):
        environment = _environment(device)
        for methods, (name, layouts) in product(in_rounds(options.methods), options.layouts.items()):
            gradients = Gradients(name, layouts, device)
            for each in measure_model(gradients, methods, options.steps, options.seconds):
                if isinstance(each, Failure):
                    failed.append(each)
                else:
                    found.append(each)
                if options.json is not None:  # now, for what comes may be killed
                    write(options.json, environment, found, failed)
    for name in options.layouts:
        without = [each for each in failed if each.model == name]
        measured = [each for each in found if each.model == name]
        print_table(f"{name} on {environment['device']}, a step without the network", measured, without)


def _environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    loader = loader_for(device)
    return {
        **machine(),
        "command": shlex.join(["python", "-m", "bench.compressors", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {torch.get_num_threads()} threads",
        "kernels": "torch" if loader is None else type(loader).__name__.lower(),
        "ranks_per_node": list(RANKS_PER_NODE),
        "empty_all_reduce_us": empty_all_reduce_us(device),
    }


if __name__ == "__main__":
    main()
