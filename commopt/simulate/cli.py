"""`python -m commopt simulate`: what would a training step take on that cluster?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from commopt.command_line import BAD_INPUT, number, output_file, reader_has_gone, refuse, whole
from commopt.cost import Links
from commopt.errors import ConfigurationError
from commopt.simulate import picture, report
from commopt.simulate.cluster import INTRA_GB_PER_S, Cluster
from commopt.simulate.gpus import GPUS, gpu
from commopt.simulate.models import MODELS, model
from commopt.simulate.network import Network
from commopt.simulate.options import MOST_GPUS, parse_gb_per_s, parse_gbps, parse_nodes
from commopt.simulate.published import reproductions
from commopt.simulate.scaling import Scaling
from commopt.simulate.step import OVERHEAD_US
from commopt.simulate.stragglers import Stragglers
from commopt.simulate.strategies import DEFAULT, Strategy, strategy
from commopt.simulate.workload import Workload, of_model
from commopt.simulate.workload_file import load

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
    add("--published", action="store_true", help="simulate published figures instead, and compare")

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
    network("--lanes", type=int, choices=(1, 2), help="2: levels work on different chunks at once")

    add("--plot", type=output_file, metavar="FILE", help="draw efficiency against GPUs: .png, .svg or .pdf")
    add("-o", "--output", type=output_file, metavar="FILE", help="write inputs and results as JSON")


def run(options: argparse.Namespace) -> int:
    """Simulate, print, write, and return the exit status."""
    try:
        _published(options) if options.published else _scaling(options)
        sys.stdout.flush()
    except BrokenPipeError:
        reader_has_gone()
    except (ConfigurationError, OSError) as error:
        return refuse("commopt simulate", error)
    return 0


def _published(options: argparse.Namespace) -> None:
    found = reproductions()
    report.show_published(found)
    _write(options.output, report.published_document(found))


@dataclass(frozen=True)
class _Request:
    """What was asked for, checked."""

    nodes: tuple[int, ...]
    strategies: Sequence[Strategy]
    workload: Callable[[int], Workload]
    batch: int
    cluster: Cluster

    @classmethod
    def of(cls, options: argparse.Namespace) -> _Request:
        if options.model is None:
            raise ConfigurationError(f"--model is missing; pass one of {', '.join(MODELS)}, or a file")
        workload, batch = _workload(options)
        return cls(
            parse_nodes(options.nodes, options.gpus_per_node),
            [strategy(name, options.buckets) for name in dict.fromkeys(options.strategies)],
            workload,
            batch,
            Cluster(options.gpus_per_node, gpu(options.gpu), _links(options)),
        )


def _scaling(options: argparse.Namespace) -> None:
    request = _Request.of(options)
    if options.plot is not None:
        picture.require_picture(options.plot, request.nodes)
    scaling = Scaling(
        request.workload,
        request.cluster,
        overhead_us=options.overhead_us,
        stragglers=Stragglers(options.straggler),
        lanes=options.lanes,
    )
    sweep = scaling.strong if options.strong else scaling.weak
    rows = sweep(request.nodes, request.strategies, request.batch)
    workload = request.workload(rows[0].batch)
    kind = "strong" if options.strong else "weak"
    title = f"{workload.name} on nodes of {options.gpus_per_node} GPUs, {kind} scaling"
    report.show(title, rows)
    print(f"computation: {workload.note}")
    batches: dict[str, int | None] = {}
    if options.smallest_batch is not None:
        largest = max(request.nodes)
        batches = {
            each.name: scaling.smallest_batch(largest, each, options.smallest_batch) for each in request.strategies
        }
        report.show_smallest(batches, options.smallest_batch, largest * options.gpus_per_node)
    inputs = _inputs(options, request, workload)
    _write(options.output, report.as_document(inputs, rows, batches))
    if options.plot is not None:
        picture.draw(title, _foot(request.cluster, workload), rows, options.plot)


def _workload(options: argparse.Namespace) -> tuple[Callable[[int], Workload], int]:
    """Return the workload by its batch, and the batch that was asked for."""
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
    told = {name: value for name, value in given.items() if value is not None}
    connections = options.sockets is not None or options.channels is not None
    if options.links is not None:
        if told or connections or options.rings or options.nic is not None or options.intra is not None:
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
        **told,
    )


def _inputs(options: argparse.Namespace, request: _Request, workload: Workload) -> Mapping[str, Any]:
    typed = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in ("command", "output", "plot", "published")
    }
    links = request.cluster.links
    if isinstance(links, Network):
        used = {name: None if value == inf else value for name, value in vars(links).items()}
    else:
        used = {"measured": vars(links.header)}
    computed = {"note": workload.note, "compute_us": workload.compute_us, "gradient_nbytes": workload.nbytes}
    return {"options": typed, "network": used, "gpu": request.cluster.gpu.name, "computation": computed}


def _foot(cluster: Cluster, workload: Workload) -> str:
    links = cluster.links
    if isinstance(links, Network):
        ports = f"{links.nics} x {links.nic_gbps:g} Gb/s" if links.nics > 1 else f"{links.nic_gbps:g} Gb/s"
        where = f"{ports} per node of {cluster.gpus_per_node}, {links.intra_gb_per_s:g} GB/s inside"
    else:
        where = f"links measured on {len(links.header.nodes)} nodes, {links.header.date[:10]}"
    return f"simulated: {workload.note}; {where}"


def _write(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
