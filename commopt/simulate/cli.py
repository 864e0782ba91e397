# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt simulate`: how long would a training step take on that cluster?"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from math import inf
from pathlib import Path
from textwrap import wrap
from typing import Any

from commopt.command_line import BAD_INPUT, number, output_file, reader_has_gone, refuse, whole, writing
from commopt.cost import Links
from commopt.display import WIDTH
from commopt.document import write_whole
from commopt.errors import ConfigurationError, did_you_mean
from commopt.simulate import report
from commopt.simulate.cluster import GPUS, INTRA_GB_PER_S, ClusterSpec, NetworkSpec, gpu
from commopt.simulate.model_zoo import MODELS, model
from commopt.simulate.scaling import DEFAULT, Scaling, strategy
from commopt.simulate.step import OVERHEAD_US, USUAL_SPREAD, Stragglers
from commopt.simulate.throughput import usual_batch
from commopt.simulate.workload import Workload, load, of_model

MOST_GPUS = 2**14
EPILOG = f"""exit status: 0, {BAD_INPUT} bad input (one line on stderr).
Rates are in one direction: Gb/s of a network port, GB/s between two GPUs of a node. docs/simulator.md has the formulas
and every assumption. Nothing here is a measurement."""
_MOST_SAMPLES = 2**24
_SHARE = number(0.0, 1.0)


def parse_gbps(text: str) -> float:
    """Return Gb/s from "25gbps", "25G" or "25", as a `type=`."""
    return _rate(text, r"(?:[gG]|[gG]bps|[gG]bit/s|[gG]b/s)?", "Gb/s (bits); write for example 25gbps")


def parse_gb_per_s(text: str) -> float:
    """Return GB/s from "200GBps" or "200", or the rate of a kind of link, as a `type=`."""
    if text in INTRA_GB_PER_S:
        return INTRA_GB_PER_S[text]
    kinds = ", ".join(INTRA_GB_PER_S)
    return _rate(text, "(?:GBps|GB/s)?", f"GB/s (bytes); write for example 200GBps, or one of {kinds}")


def _rate(text: str, unit: str, fix: str) -> float:
    match = re.fullmatch(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)\s*{unit}", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate in {fix}")
    return float(match[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the simulator; those of the network have the names of NetworkSpec's fields."""
    parser.description = "Simulate a training step on a cluster of any number of GPUs, by several strategies."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)}, or a file that describes a workload")
    add("--nodes", default="2,8,32", help="1,2,5, or 1..512: the powers of two between (default 2,8,32)")
    add("--gpus-per-node", type=whole(1, MOST_GPUS), default=8, metavar="N", help="GPUs on each node (default 8)")
    add("--strategies", nargs="+", default=list(DEFAULT), metavar="NAME", help="stock, lossless, lossy, or presets")
    add("-o", "--output", type=output_file, metavar="FILE", help="write inputs and results as JSON")

    add = parser.add_argument_group("training").add_argument
    batch = "samples per GPU (default: as published for the model, 12 of gpt2, 256 of resnet50; or the file's)"
    add("--gpu", default="a100", help=f"one of {', '.join(GPUS)} (default a100)")
    add("--precision", default="fp16", help="fp16, bf16, tf32 or fp32 (default fp16); gradients are float32")
    add("--batch", type=whole(1, _MOST_SAMPLES), metavar="N", help=batch)
    add("--compute-efficiency", type=_SHARE, metavar="X", help="share of the GPU's peak (default: as published)")
    spread = f"relative spread of the ranks' times of computation (default {USUAL_SPREAD})"
    add("--straggler", type=float, default=USUAL_SPREAD, metavar="S", help=spread)
    add("--buckets", choices=("planned", "ddp"), default="planned", help="of every strategy but stock")
    add("--overhead-us", type=number(least=0.0), default=OVERHEAD_US, metavar="T", help="of each bucket (default 100)")

    add = parser.add_argument_group("network").add_argument
    kinds = ", ".join(INTRA_GB_PER_S)
    add("--nic", dest="nic_gbps", type=parse_gbps, metavar="RATE", help="of one port of a node, e.g. 25gbps")
    add("--nics", type=whole(1, MOST_GPUS), metavar="N", help="ports of a node (default 1)")
    add("--intra", dest="intra_gb_per_s", type=parse_gb_per_s, metavar="RATE", help=f"or {kinds} (default nvlink3)")
    add("--efficiency", type=_SHARE, metavar="X", help="share of the line rate that payload gets (default 0.9)")
    latency = "of a step between nodes (default 15)"
    add("--latency-us", dest="inter_latency_us", type=number(least=0.0), metavar="T", help=latency)
    add("--socket-gbps", type=number(), metavar="G", help="the most that a TCP connection carries (default: no limit)")
    add("--connections", type=whole(1, 2**20), metavar="N", help="of a ring: channels x sockets (default 2)")
    add("--rings", dest="trees", action="store_false", default=None, help="no trees, as NCCL before 2.4")
    add("--racks", type=whole(1, MOST_GPUS), metavar="N", help="among which the nodes are divided (default 1)")
    shared = "rate of all nodes of a rack over that of its uplink, 4 for 4:1 (default 1)"
    add("--oversubscription", type=number(least=1.0), metavar="X", help=shared)
    add("--links", type=Path, metavar="FILE", help="links that `commopt probe` measured, in place of all these")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, write, and return the exit status."""
    try:
        _simulate(options)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_has_gone()
    except (ConfigurationError, OSError) as error:
        return refuse("commopt simulate", error)
    return 0


def _simulate(options: argparse.Namespace) -> None:
    workload_of, batch = _workload(options)
    nodes = parse_nodes(options.nodes, options.gpus_per_node)
    strategies = [strategy(name, options.buckets) for name in dict.fromkeys(options.strategies)]
    cluster = ClusterSpec(options.gpus_per_node, gpu(options.gpu), _links(options))
    scaling = Scaling(workload_of, cluster, overhead_us=options.overhead_us, stragglers=Stragglers(options.straggler))
    points = scaling.weak(nodes, strategies, batch)
    workload = workload_of(batch)
    each = f"{workload.samples} samples per GPU" if workload.samples else "equal batches per GPU"
    computed = f"{workload.compute_us / 1e3:.1f} ms of computation"
    report.show(f"{workload.name} on nodes of {options.gpus_per_node} GPUs, {each}, {computed}", points)
    links = "measured" if isinstance(cluster.links, Links) else str(cluster.links)
    for line in scaling.lost_to_racks(strategies, batch):
        print(*wrap(line, WIDTH), sep="\n")
    for line in (f"computation: {workload.note}", f"network: {links}; {options.overhead_us:g} us for each bucket"):
        print(*wrap(line, WIDTH), sep="\n")
    if options.output is not None:
        document = report.as_document(_inputs(options, cluster, workload), points)
        with writing(options.output):
            write_whole(options.output, f"{json.dumps(document, indent=1)}\n".encode())


def _workload(options: argparse.Namespace) -> tuple[Callable[[int], Workload], int]:
    """Return the workload by the batch of a rank, and that batch."""
    names = ", ".join(MODELS)
    if options.model is None:
        raise ConfigurationError(f"--model is missing; pass one of {names}, or a file")
    if options.model in MODELS:
        computed = {"precision": options.precision, "efficiency": options.compute_efficiency}
        usual = options.batch or usual_batch(options.model)
        return partial(of_model, model(options.model), gpu(options.gpu), **computed), usual
    if not Path(options.model).exists():
        meant = did_you_mean(options.model, MODELS)
        raise ConfigurationError(f"--model {options.model!r} is no file, and none of {names}{meant}")
    loaded = load(options.model)
    batch = loaded.samples if options.batch is None else options.batch
    return (lambda count: loaded if count == loaded.samples else loaded.scaled(count)), batch


def _links(options: argparse.Namespace) -> NetworkSpec | Links:
    typed = {field.name: getattr(options, field.name, None) for field in fields(NetworkSpec)}
    given = {name: value for name, value in typed.items() if value is not None}
    if options.links is not None:
        if given:
            raise ConfigurationError(
                "--links describes the network; leave out --nic, --intra and the options that adjust them"
            )
        return Links.load(options.links)
    if options.nic_gbps is None:
        raise ConfigurationError("the network is missing; pass --nic, for example --nic 25gbps, or --links FILE")
    if options.connections is not None and options.socket_gbps is None:
        raise ConfigurationError("--connections needs --socket-gbps, the rate of each one")
    if options.oversubscription is not None and options.racks is None:
        raise ConfigurationError("--oversubscription needs --racks, among which the nodes are divided")
    return NetworkSpec(**{"intra_gb_per_s": INTRA_GB_PER_S["nvlink3"]} | given)


def _inputs(options: argparse.Namespace, cluster: ClusterSpec, workload: Workload) -> Mapping[str, Any]:
    typed = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    links = cluster.links
    if isinstance(links, NetworkSpec):
        used = {name: None if value == inf else value for name, value in vars(links).items()}
    else:
        used = {"measured": vars(links.header)}
    computed = {"note": workload.note, "compute_us": workload.compute_us, "gradient_nbytes": workload.nbytes}
    return {"options": typed, "network": used, "gpu": cluster.gpu.name, "computation": computed}


def parse_nodes(text: str, gpus_per_node: int) -> tuple[int, ...]:
    """Return node counts from "1,2,5", or from "1..512": both ends and the powers of two between them."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*\.\.\s*([0-9]{1,9}))?\s*", part)
        if match is None:
            raise ConfigurationError(f"--nodes {text!r} is no number of nodes; write for example 4, 1,2,5 or 1..512")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last:
            raise ConfigurationError(f"--nodes {text!r}: {part.strip()!r} must count up from 1 or more")
        powers = {2**exponent for exponent in range(last.bit_length())}
        counts += [count for count in sorted({first, last} | powers) if first <= count <= last]
    most = max(counts) * gpus_per_node
    if most > MOST_GPUS:
        raise ConfigurationError(f"--nodes {text!r} makes {most} GPUs; {MOST_GPUS} are the most that is simulated")
    return tuple(dict.fromkeys(counts))
