"""`python -m commopt simulate`: what would a training step take on that cluster?"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from commopt.command_line import BAD_INPUT, number, output_file, reader_has_gone, refuse, whole
from commopt.cost import Links
from commopt.errors import ConfigurationError
from commopt.simulate import report
from commopt.simulate.cluster import GPUS, INTRA_GB_PER_S, ClusterSpec, Network, gpu
from commopt.simulate.model_zoo import MODELS, model
from commopt.simulate.scaling import DEFAULT, Scaling, Strategy, strategy
from commopt.simulate.step import OVERHEAD_US, Stragglers
from commopt.simulate.workload import Workload, load, of_model

MOST_GPUS = 2**14
EPILOG = f"""exit status: 0, {BAD_INPUT} bad input (one line on stderr).
Rates are in one direction: Gb/s of a network port, GB/s between two GPUs of a node. docs/simulator.md has the formulas
and every assumption. Nothing here is a measurement."""
_BATCH = 64
_MOST_SAMPLES = 2**24
_CHANNELS, _SOCKETS = 2, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the simulator."""
    parser.description = "Simulate a training step on a cluster of any number of GPUs, by several strategies."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"{', '.join(MODELS)}, or a file that describes a workload")
    add("--nodes", default="1..64", help="1,2,5, or 1..512: the powers of two between (default 1..64)")
    add("--gpus-per-node", type=whole(1, MOST_GPUS), default=8, metavar="N", help="GPUs on each node (default 8)")
    add("--strategies", nargs="+", default=list(DEFAULT), metavar="NAME", help="stock, lossless, lossy, or presets")

    training = parser.add_argument_group("training").add_argument
    training("--gpu", default="a100", help=f"one of {', '.join(GPUS)} (default a100)")
    training("--precision", default="fp16", help="fp16, bf16, tf32 or fp32 (default fp16); gradients are float32")
    training(
        "--batch", type=whole(1, _MOST_SAMPLES), metavar="N", help=f"samples per GPU (default {_BATCH}, or the file's)"
    )
    training(
        "--compute-efficiency", type=number(0.0, 1.0), metavar="X", help="share of the GPU's peak that a step reaches"
    )
    training("--straggler", type=float, default=0.0, metavar="S", help="spread of computation between ranks, e.g. 0.02")
    training("--buckets", choices=("planned", "ddp"), default="planned", help="of every strategy but stock")
    training("--overhead-us", type=number(-1.0), default=OVERHEAD_US, metavar="T", help="of each bucket (default 100)")
    training("--strong", action="store_true", help="all GPUs share one --batch: strong scaling")
    training(
        "--smallest-batch", type=number(0.0, 1.0), metavar="E", help="find the batch that keeps efficiency E, e.g. 0.9"
    )

    network = parser.add_argument_group("network").add_argument
    network("--nic", metavar="RATE", help="of one port of a node, e.g. 25gbps")
    network("--nics", type=whole(1, MOST_GPUS), metavar="N", help="ports of a node (default 1)")
    network("--intra", metavar="RATE", help=f"e.g. 200GBps, or {', '.join(INTRA_GB_PER_S)} (default nvlink3)")
    network(
        "--efficiency",
        type=number(0.0, 1.0),
        metavar="X",
        help="share of the line rate that payload gets (default 0.9)",
    )
    network("--latency-us", type=number(-1.0), metavar="T", help="of a step between nodes (default 15)")
    network(
        "--socket-gbps", type=number(), metavar="G", help="what a TCP connection carries at most (default: no limit)"
    )
    network("--sockets", type=whole(1, 1024), metavar="N", help="connections of a channel (default 1)")
    network("--channels", type=whole(1, 1024), metavar="N", help="of a ring (default 2)")
    network("--rings", action="store_true", help="no trees, as NCCL before 2.4")
    network("--links", type=Path, metavar="FILE", help="links that `commopt probe` measured, in place of all these")

    add("--plot", type=output_file, metavar="FILE", help="draw efficiency against GPUs: .png, .svg or .pdf")
    add("-o", "--output", type=output_file, metavar="FILE", help="write inputs and results as JSON")


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
    if options.model is None:
        raise ConfigurationError(f"--model is missing; pass one of {', '.join(MODELS)}, or a file")
    workload_of, batch = _workload(options)
    nodes = parse_nodes(options.nodes, options.gpus_per_node)
    strategies = [strategy(name, options.buckets) for name in dict.fromkeys(options.strategies)]
    cluster = ClusterSpec(options.gpus_per_node, gpu(options.gpu), _links(options))
    if options.plot is not None:
        report.require_picture(options.plot, nodes)
    scaling = Scaling(workload_of, cluster, overhead_us=options.overhead_us, stragglers=Stragglers(options.straggler))
    points = (scaling.strong if options.strong else scaling.weak)(nodes, strategies, batch)
    workload = workload_of(points[0].batch)
    kind = "strong" if options.strong else "weak"
    title = f"{workload.name} on nodes of {options.gpus_per_node} GPUs, {kind} scaling"
    report.show(title, points)
    print(f"computation: {workload.note}")
    batches = _smallest_batches(options, scaling, max(nodes), strategies)
    if options.output is not None:
        document = report.as_document(_inputs(options, cluster, workload), points, batches)
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot is not None:
        report.draw(title, _caption(cluster, workload), points, options.plot)


def _smallest_batches(
    options: argparse.Namespace, scaling: Scaling, nodes: int, strategies: Sequence[Strategy]
) -> dict[str, int | None]:
    if options.smallest_batch is None:
        return {}
    batches = {each.name: scaling.smallest_batch(nodes, each, options.smallest_batch) for each in strategies}
    report.show_smallest(batches, options.smallest_batch, nodes * options.gpus_per_node)
    return batches


def _workload(options: argparse.Namespace) -> tuple[Callable[[int], Workload], int]:
    """Return the workload by its batch, and the batch of a rank (all ranks with --strong)."""
    card = gpu(options.gpu)
    if options.model in MODELS:
        known = model(options.model)
        return (
            lambda batch: of_model(known, card, batch, options.precision, options.compute_efficiency),
            _BATCH if options.batch is None else options.batch,
        )
    if not Path(options.model).exists():
        raise ConfigurationError(f"--model {options.model!r} is no file, and none of {', '.join(MODELS)}")
    loaded = load(options.model, card, options.precision, options.compute_efficiency)
    batch = loaded.samples if options.batch is None else options.batch
    return (lambda count: loaded if count == loaded.samples else loaded.scaled(count)), batch


def _links(options: argparse.Namespace) -> Network | Links:
    given = {
        "nics": options.nics,
        "efficiency": options.efficiency,
        "inter_latency_us": options.latency_us,
        "socket_gbps": options.socket_gbps,
    }
    adjusted = {name: value for name, value in given.items() if value is not None}
    connections = options.sockets is not None or options.channels is not None
    if options.links is not None:
        if adjusted or connections or options.rings or options.nic is not None or options.intra is not None:
            raise ConfigurationError(
                "--links says what the network does; leave out --nic, --intra and what adjusts them"
            )
        return Links.load(options.links)
    if options.nic is None:
        raise ConfigurationError("the network is missing; pass --nic, for example --nic 25gbps, or --links FILE")
    if connections and options.socket_gbps is None:
        raise ConfigurationError("--sockets and --channels tell nothing without --socket-gbps, what each one carries")
    channels = _CHANNELS if options.channels is None else options.channels
    sockets = _SOCKETS if options.sockets is None else options.sockets
    return Network(
        parse_gbps(options.nic, "--nic"),
        parse_gb_per_s(options.intra or "nvlink3", "--intra"),
        connections=channels * sockets,
        trees=not options.rings,
        **adjusted,
    )


def _inputs(options: argparse.Namespace, cluster: ClusterSpec, workload: Workload) -> Mapping[str, Any]:
    typed = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("command", "output", "plot")
    }
    links = cluster.links
    if isinstance(links, Network):
        used = {name: None if value == inf else value for name, value in vars(links).items()}
    else:
        used = {"measured": vars(links.header)}
    computed = {"note": workload.note, "compute_us": workload.compute_us, "gradient_nbytes": workload.nbytes}
    return {"options": typed, "network": used, "gpu": cluster.gpu.name, "computation": computed}


def _caption(cluster: ClusterSpec, workload: Workload) -> str:
    links = cluster.links
    if isinstance(links, Network):
        ports = f"{links.nics} x {links.nic_gbps:g} Gb/s" if links.nics > 1 else f"{links.nic_gbps:g} Gb/s"
        where = f"{ports} per node of {cluster.gpus_per_node}, {links.intra_gb_per_s:g} GB/s inside"
    else:
        where = f"links measured on {len(links.header.nodes)} nodes, {links.header.date[:10]}"
    return f"simulated: {workload.note}; {where}"


_GBIT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?:g|gbps|gbit/s|gb/s)?", re.IGNORECASE)
_GBYTE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?:GBps|GB/s)?")


def parse_gbps(text: str, option: str) -> float:
    """Return Gb/s from "25gbps", "25G" or "25"; raises ConfigurationError."""
    match = _GBIT.fullmatch(text.strip())
    if match is None or "GB" in text:
        raise ConfigurationError(f"{option} {text!r} is no rate in Gb/s (bits); write for example 25gbps")
    return float(match[1])


def parse_gb_per_s(text: str, option: str) -> float:
    """Return GB/s from "200GBps" or "200", or what a kind of link achieves; raises ConfigurationError."""
    if text in INTRA_GB_PER_S:
        return INTRA_GB_PER_S[text]
    match = _GBYTE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(
            f"{option} {text!r} is no rate in GB/s (bytes); write for example 200GBps, or one of "
            f"{', '.join(INTRA_GB_PER_S)}"
        )
    return float(match[1])


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
