# SPDX-License-Identifier: Apache-2.0
"""How fast is the parameter server's link beside gloo? `python -m bench.evidence.server_link --json FILE`.

Two processes of this machine send a tensor to and fro over loopback: over the link, whose frames are signed, and by
gloo's send and recv.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.command_line import measure_lines
from bench.document import table
from bench.output import read_lines, written_by
from commopt.command_line import CommandParser, content_of, output_file, whole
from commopt.server.channel import SecureChannel, connect
from commopt.server.listener import SecureListener

PROGRAM = "bench.evidence.server_link"
_SECRET = "of this benchmark"
_TIMEOUT_S = 60.0
_MIB = 2**20

Exchange = Callable[[Tensor], None]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=whole(1, 4096), nargs="+", default=[1, 16, 128], help="of a message")
    parser.add_argument("--repeats", type=whole(1), default=9, help="of which the median counts (default 9)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each row")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    return parser.parse_args(arguments)


# ------------------------------------------------------------------------------------------- the other process


def echo_link(port: int, mib: Sequence[int], repeats: int) -> None:
    """Receive each message over the link, and send it back."""
    torch.set_num_threads(1)
    link = connect("127.0.0.1", port, _SECRET, _TIMEOUT_S, _TIMEOUT_S)
    for message in messages(mib):
        for _ in range(repeats):
            link.receive_into(message)
            link.send_tensor(message)
    link.close()


def echo_gloo(file: str, mib: Sequence[int], repeats: int) -> None:
    """Receive each message by gloo, and send it back."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=1, world_size=2)
    for message in messages(mib):
        for _ in range(repeats):
            dist.recv(message, 0)
            dist.send(message, 0)
    dist.destroy_process_group()


def messages(mib: Sequence[int]) -> list[Tensor]:
    """Return a tensor of each length."""
    return [torch.ones(each * _MIB // 4) for each in mib]


# ------------------------------------------------------------------------------------------- this process


def timed(name: str, mib: Sequence[int], repeats: int, to: Exchange, fro: Exchange) -> list[dict[str, Any]]:
    """Return a record for each length: GB/s one way, of the median time to and fro."""
    records = []
    for each, message in zip(mib, messages(mib), strict=True):
        took_s = []
        for _ in range(repeats):
            begin = time.perf_counter()
            to(message)
            fro(message)
            took_s.append(time.perf_counter() - begin)
        records.append({"by": name, "mib": each, "gbps": 2 * message.nbytes / 1e9 / median(took_s)})
    return records


def measure(mib: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Measure both."""
    context, records = multiprocessing.get_context("spawn"), []

    def serve(link: SecureChannel, _: str) -> None:
        records.extend(timed("link", mib, repeats, link.send_tensor, lambda message: void(link.receive_into(message))))

    listener = SecureListener("127.0.0.1", 0, _SECRET, _TIMEOUT_S, serve, print)
    listener.start()
    other = context.Process(target=echo_link, args=(listener.port, mib, repeats))
    other.start()
    other.join()
    listener.close()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "meeting")
        other = context.Process(target=echo_gloo, args=(file, mib, repeats))
        other.start()
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=2)
        records += timed("gloo", mib, repeats, lambda each: dist.send(each, 1), lambda each: void(dist.recv(each, 1)))
        other.join()
        dist.destroy_process_group()
    return records


def void(_: object) -> None:
    """Return nothing."""


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its rows; raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "row")


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each length."""
    found = {(record["by"], record["mib"]): record["gbps"] for record in records}
    lengths = sorted({record["mib"] for record in records})
    rows = [[str(mib), *(f"{found[by, mib]:.2f}" for by in ("link", "gloo"))] for mib in lengths]
    caption = f"GB/s (1e9) one way between two processes over loopback, {header['cpu_count']} processors."
    return f"{table(['message, MiB', 'link, signed', 'gloo'], rows)}\n\n{caption}"


def main() -> int:
    """Measure, and report."""
    options = parse_options()
    torch.set_num_threads(1)
    return measure_lines(
        PROGRAM, ("server_link", "row"), options, {}, lambda: measure(options.mib, options.repeats), markdown
    )


if __name__ == "__main__":
    sys.exit(main())
