# SPDX-License-Identifier: Apache-2.0
"""The verdict of `commopt doctor --measure` on the quickstart's script: `python -m bench.evidence.verdict --json FILE`.

It runs on two emulated nodes of two ranks, 200 Mbit/s between them, and so needs root. With `--training` it is the
verdict at the end of `commopt run --report` on the same script. `--show FILE` prints the verdict on what was measured
then.
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
STRATEGY = "flat"
_BEGINS = "of a step of"  # a verdict's first line
_CLUSTER = ("--nodes", "2", "--ranks-per-node", "2", "--rate", "200mbit")


def measured(folder: Path) -> Measurements:
    """Measure in an empty folder; raises CalledProcessError for any verdict but "as it should be"."""
    _on_nodes(folder, "-m", "commopt", "doctor", "--measure", "--save", "measured.json", "--script", "train.py")
    return Measurements.load(folder / "measured.json")


def after_training(folder: Path) -> list[str]:
    """Train in an empty folder, and return the lines of the verdict; raises CalledProcessError if training fails."""
    printed = _on_nodes(folder, "-m", "commopt", "run", "--strategy", STRATEGY, "--report", "train.py").splitlines()
    return printed[next(place for place, line in enumerate(printed) if _BEGINS in line) :]


def _on_nodes(folder: Path, *command: str) -> str:
    """Run a command on the script, and return what the first rank printed."""
    script = _SCRIPT.search(_QUICKSTART.read_text())
    assert script is not None  # tests/test_site.py runs it
    (folder / "train.py").write_text(script[1])
    words = [sys.executable, "-m", "commopt", "cluster", *_CLUSTER, *command]
    return subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def read(path: Path) -> list[str]:
    """Return the lines of the verdict on what `--json` wrote; raises ValueError for anything else."""
    try:
        document = json.loads(read_text(path))
        if isinstance(lines := document.get("lines"), list):
            return [str(line) for line in lines]
        return lines_of(judge(Measurements.read(document["measured"])))
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise ValueError(f"{path} is none of python -m bench.evidence.verdict --json: {error}") from None


def main() -> int:
    """Measure and write, or print."""
    document = (bench.evidence.verdict.__doc__ or "").splitlines()[0]
    parser = CommandParser(prog="python -m bench.evidence.verdict", description=document)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="measure, and write it")
    parser.add_argument("--show", type=content_of(read), metavar="FILE", help="print the verdict on such a file")
    parser.add_argument("--training", action="store_true", help="the verdict at the end of a training")
    options = parser.parse_args()
    if (options.json is None) == (options.show is None):
        parser.error("pass --json FILE or --show FILE")
    if options.show is not None:
        print("```text", *options.show, "```", sep="\n")
        return 0
    command = shlex.join(["python", "-m", "bench.evidence.verdict", *sys.argv[1:]])
    header = {"kind": "verdict", **machine(), "command": command}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = {"lines": after_training(folder)} if options.training else {"measured": measured(folder).as_document()}
    options.json.write_text(json.dumps({"header": header, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
