# SPDX-License-Identifier: Apache-2.0
"""Does anything grow in a long job? `python -m bench.evidence.soak --json FILE`: 20,000 steps by each strategy.

Two local ranks, which count as two nodes, train a small network; with "hsdp/" before the strategy four, two a node.
With "parameter_server:..." they are two workers, and a third process is the server. Every so many steps each notes what
it holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.document import table
from bench.environment import machine
from bench.output import read_lines, write_results, written_by
from commopt.chaos.parameter_server import settings_of
from commopt.chaos.rank import SERVER
from commopt.chaos.train import BATCH, CLASSES, WIDTH, network
from commopt.command_line import CommandParser, content_of, output_file, refuse, whole
from commopt.server import Scheduler, Server

PROGRAM = "bench.evidence.soak"
HSDP = "hsdp/"
STRATEGIES = (
    *("hierarchical", "hierarchical_quantized:bits=4", "hierarchical_powersgd", "onebit_local:period=16"),
    *("hsdp/hierarchical_quantized:bits=4", "parameter_server:period=4:compressor=OneBit()"),
)
RANKS = 2  # of a strategy under DDP
_POLL_S = 0.02
LEARNING_RATE = 1e-5  # so small that the residuals are those of one model, whose gradients do not grow

# What may be between the first quarter, in which caches fill, and the end.
_GROWN_BYTES = 16 * 2**20
_NORM_TIMES = 3.0
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--steps", type=whole(8), default=20_000, help="of each strategy (default 20000)")
    parser.add_argument(
        "--every", type=whole(1), default=1000, metavar="STEPS", help="between two notes (default 1000)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each note")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    return parser.parse_args(arguments)


# --------------------------------------------------------------------------------------------------- a rank


def held(norm: float, store: dist.Store, folder: str) -> dict[str, Any]:
    """Return what this process holds. store_keys: of all ranks; files: in the folder for temporary ones."""
    gc.collect()
    return {
        "memory_nbytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_NBYTES,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": sum(len(files) for _, _, files in os.walk(folder)),
        "store_keys": store.num_keys(),
        "residual_norm": norm,
    }


def soak(rank: int, strategy: str, steps: int, every: int, port: int, folder: str) -> None:
    """Train as one rank; write a line for each note into a file of the rank."""
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["COMMOPT_FLIGHT"] = f"{folder}/temporary"
    torch.set_num_threads(1)
    logging.getLogger("commopt").setLevel(logging.ERROR)
    store = dist.TCPStore("127.0.0.1", port)
    with Path(folder, f"rank{rank}.jsonl").open("w") as notes:

        def note(step: int, norm: float) -> None:
            print(json.dumps({"step": step, **held(norm, store, f"{folder}/temporary")}), file=notes, flush=True)

        if _has_server(strategy) and rank == RANKS:
            _serve(strategy, steps, every, store, note)
            return
        model, residual_norm, leave = _attached(rank, strategy, store)
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
        draw = torch.Generator().manual_seed(rank)
        for step in range(1, steps + 1):
            inputs = torch.randn(BATCH, WIDTH, generator=draw)
            loss = cross_entropy(model(inputs), inputs[:, :CLASSES].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % every == 0:
                note(step, residual_norm())
        leave()


def _attached(rank: int, strategy: str, store: dist.Store) -> tuple[Any, Callable[[], float], Callable[[], None]]:
    """Return a model with the strategy, what tells the norm of its residuals, and what ends the training."""
    if _has_server(strategy):
        model = network()
        worker = commopt.attach(model, settings_of(strategy, store.get("scheduler").decode()))
        return model, lambda: float(torch.cat(worker._residuals).norm()), worker.close
    ranks = processes(strategy)
    os.environ["COMMOPT_RANKS_PER_NODE"] = str(ranks // RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    module = network()
    trained: Any = module
    if strategy.startswith(HSDP):
        mesh = init_device_mesh("cpu", (RANKS, ranks // RANKS), mesh_dim_names=("replicate", "shard"))
        for layer in module:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        trained = DistributedDataParallel(module, bucket_cap_mb=0.05)
    comm = commopt.attach(trained, strategy.removeprefix(HSDP))
    return trained, lambda: float(comm.stats().get("residual_norm", 0.0)), dist.destroy_process_group


def _serve(strategy: str, steps: int, every: int, store: dist.Store, note: Callable[[int, float], None]) -> None:
    """Be scheduler and server until the workers have made their steps."""
    scheduler = Scheduler()
    server = Server(scheduler.address, workers=RANKS)
    store.set("scheduler", scheduler.address)
    noted = 0
    while noted < steps // every * every:
        time.sleep(_POLL_S)
        if server.failure:
            raise RuntimeError(server.failure)
        if server.done >= RANKS * (noted + every):
            noted += every
            shared = server._rounds.parameters()
            owed = (torch.sub(*pair) for pair in zip(shared.exact, shared.public, strict=True))
            note(noted, float(torch.cat(list(owed)).norm()))
    while server.workers:
        time.sleep(_POLL_S)
    server.close()
    scheduler.close()


def _has_server(strategy: str) -> bool:
    return strategy.partition(":")[0] == SERVER


def processes(strategy: str) -> int:
    """Return how many processes a strategy is tried with."""
    return RANKS + 1 if _has_server(strategy) else 2 * RANKS if strategy.startswith(HSDP) else RANKS


# -------------------------------------------------------------------------------------------------- the whole


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train by each strategy; return the notes of all ranks. Raises when a rank fails."""
    found = []
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory(prefix="commopt-soak-") as folder:
            Path(folder, "temporary").mkdir()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it outlives both ranks
            ranks = processes(strategy)
            mp.spawn(soak, (strategy, options.steps, options.every, store.port, folder), nprocs=ranks)
            for rank in range(ranks):
                lines = Path(folder, f"rank{rank}.jsonl").read_text().splitlines()
                found += [{"strategy": strategy, "rank": rank, **json.loads(line)} for line in lines]
        print(f"{strategy}: {'; '.join(grown(found, strategy)) or 'flat'}", file=sys.stderr, flush=True)
    return found


def grown(records: Sequence[Mapping[str, Any]], strategy: str) -> list[str]:
    """Return what has grown with a strategy, in words: from the end of the first quarter to the end."""
    found = []
    for rank in sorted({each["rank"] for each in records if each["strategy"] == strategy}):
        mine = [each for each in records if (each["strategy"], each["rank"]) == (strategy, rank)]
        early, late = mine[max(0, len(mine) // 4 - 1)], mine[-1]
        if late["memory_nbytes"] > early["memory_nbytes"] + _GROWN_BYTES:
            found.append(_of("memory_nbytes", early, late))
        found += [_of(what, early, late) for what in ("handles", "threads", "files") if late[what] > early[what]]
        per_step = (late["store_keys"] - early["store_keys"]) / max(1, late["step"] - early["step"])
        if per_step > 0.01:
            found.append(f"{_of('store_keys', early, late)}")
        if not late["residual_norm"] <= _NORM_TIMES * early["residual_norm"] + 1e-12:
            found.append(_of("residual_norm", early, late))
    return found


def _of(what: str, early: Mapping[str, Any], late: Mapping[str, Any]) -> str:
    change = f"from {early[what]:.6g} after step {early['step']} to {late[what]:.6g} after step {late['step']}"
    return f"{what} of rank {late['rank']} {change}"


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its notes. Raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "note")


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table: of each strategy, the first rank after the first quarter and at the end; and what has grown."""
    rows, all_grown = [], []
    shown = {
        (record["strategy"], rank): f"{record['strategy']}{', the server' * (rank > 0)}"
        for record in records
        for rank in ((0, RANKS) if _has_server(record["strategy"]) else (0,))
    }
    for (strategy, rank), name in shown.items():
        mine = [each for each in records if (each["strategy"], each["rank"]) == (strategy, rank)]
        early, late = mine[max(0, len(mine) // 4 - 1)], mine[-1]
        pairs = [(early[what], late[what]) for what in ("handles", "threads", "files", "store_keys")]
        mib = [f"{each['memory_nbytes'] / 2**20:.1f}" for each in (early, late)]
        norms = [f"{each['residual_norm']:.3g}" for each in (early, late)]
        cells = [" / ".join(mib), *(f"{a} / {b}" for a, b in pairs), " / ".join(norms)]
        rows.append([name, f"{early['step']} / {late['step']}", *cells])
        all_grown += [f"{strategy}: {what}" for what in grown(records, strategy) if rank == 0]
    headings = ["strategy", "after steps", "memory MiB", "handles", "threads", "files", "keys in the store", "residual"]
    verdict = f"These have grown: {'; '.join(all_grown)}." if all_grown else "Nothing has grown, on no rank."
    return f"{table(headings, rows)}\n\n{verdict} Shown is the first rank."


def main() -> int:
    """Train, and report; return the exit status: 1 if anything has grown."""
    options = parse_options()
    if options.report:
        print(markdown(*options.report))
        return 0
    if options.steps < 4 * options.every:
        return refuse(
            f"python -m {PROGRAM}", f"--steps {options.steps} is less than four times --every {options.every}"
        )
    for strategy in options.strategies:
        try:
            settings_of(strategy) if _has_server(strategy) else commopt.build_preset(strategy.removeprefix(HSDP))
        except commopt.ConfigurationError as error:
            return refuse(f"python -m {PROGRAM}", error)
    records = measured(options)
    command = shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]])
    header = {"kind": "soak", **machine(), "command": command}
    if options.json:
        write_results(options.json, header, "note", records)
    print(markdown(header, records))
    return 1 if any(grown(records, strategy) for strategy in options.strategies) else 0


if __name__ == "__main__":
    sys.exit(main())
