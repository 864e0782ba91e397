# SPDX-License-Identifier: Apache-2.0
"""The verdict of `commopt doctor --measure` on the quickstart's script: `python -m bench.evidence.verdict --json FILE`.

It runs on two emulated nodes of two ranks, 200 Mbit/s between them, and so needs root. `--show FILE` prints the verdict
on what was measured then.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import bench.evidence.verdict
from bench.environment import machine
from commopt.command_line import CommandParser, content_of, output_file
from commopt.doctor.verdict.facts import Measurements
from commopt.doctor.verdict.judge import judge
from commopt.doctor.verdict.show import lines_of
from commopt.document import read_text
from commopt.errors import ConfigurationError

_QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.md"
_SCRIPT = re.compile(r"^cat > train\.py <<'EOF'\n(.*?)^EOF$", re.M | re.S)
_CLUSTER = ("--nodes", "2", "--ranks-per-node", "2", "--rate", "200mbit")


def measured() -> Measurements:
    """Measure in a folder of its own; raises CalledProcessError for any verdict but "as it should be"."""
    script = _SCRIPT.search(_QUICKSTART.read_text())
    assert script is not None  # tests/test_site.py runs it
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script[1])
        doctor = ("-m", "commopt", "doctor", "--measure", "--save", "measured.json", "--script", "train.py")
        command = [sys.executable, "-m", "commopt", "cluster", *_CLUSTER, *doctor]
        subprocess.run(command, cwd=folder, check=True)
        return Measurements.load(Path(folder) / "measured.json")


def read(path: Path) -> Measurements:
    """Read what `--json` wrote; raises ValueError for anything else."""
    try:
        return Measurements.read(json.loads(read_text(path))["measured"])
    except (KeyError, TypeError, ConfigurationError) as error:
        raise ValueError(f"{path} is none of python -m bench.evidence.verdict --json: {error}") from None


def main() -> int:
    """Measure and write, or print."""
    document = (bench.evidence.verdict.__doc__ or "").splitlines()[0]
    parser = CommandParser(prog="python -m bench.evidence.verdict", description=document)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="measure, and write it")
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print the verdict on such a file")
    options = parser.parse_args()
    if (options.json is None) == (options.show is None):
        parser.error("pass --json FILE or --show FILE")
    if options.show is not None:
        print("```text", *lines_of(judge(options.show)), "```", sep="\n")
        return 0
    command = shlex.join(["python", "-m", "bench.evidence.verdict", *sys.argv[1:]])
    header = {"kind": "verdict", **machine(), "command": command}
    options.json.write_text(json.dumps({"header": header, "measured": measured().as_document()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
