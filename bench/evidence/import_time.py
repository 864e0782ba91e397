# SPDX-License-Identifier: Apache-2.0
"""Measure what `import commopt` takes after torch: `python -m bench.evidence.import_time --json FILE`.

New Pythons import torch.distributed and DDP, as every training does, then commopt. Bytecode is cached, as from the
second run on. Reported are medians.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from bench.environment import machine
from bench.output import print_rows, write_results
from commopt.command_line import CommandParser, output_file, whole

_PROGRAM = """
from time import perf_counter
import torch.distributed, torch.nn.parallel
import sys
modules, begun = len(sys.modules), perf_counter()
import commopt
print(1e3 * (perf_counter() - begun), len(sys.modules) - modules)
"""


def measure() -> tuple[float, int]:
    """Return the milliseconds of one import in a new Python, and the modules that it loads."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    import_ms, modules = done.stdout.split()
    return float(import_ms), int(modules)


def main() -> None:
    """Measure, print and write the figures."""
    parser = CommandParser(prog="python -m bench.evidence.import_time", description=__doc__)
    parser.add_argument("--runs", type=whole(1), default=11)
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    measure()  # writes the bytecode
    found = [measure() for _ in range(options.runs)]
    times_ms = sorted(import_ms for import_ms, _ in found)
    row = {
        "runs": options.runs,
        "modules": found[0][1],
        "median_ms": median(times_ms),
        "least_ms": times_ms[0],
        "most_ms": times_ms[-1],
    }
    print_rows("import commopt, after torch", list(row), [[f"{value:.4g}" for value in row.values()]])
    if options.json is not None:
        header = {**machine(), "command": "python -m bench.evidence.import_time"}
        write_results(options.json, header, "import", [row])


if __name__ == "__main__":
    main()
