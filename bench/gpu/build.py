# SPDX-License-Identifier: Apache-2.0
"""Install commopt with its kernels compiled for the GPU here, or check that they are: `python -m bench.gpu.build`.

With --into FOLDER that is a virtual environment which sees all that this Python sees: torch stays where it is, and
nothing is added to the Python in use.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import torch

from bench.gpu.runner import ROOT, environment
from commopt.command_line import CommandParser
from commopt.kernels import sources


def make_environment(folder: Path) -> Path:
    """Make a virtual environment over this Python's packages, of a virtual environment too; return its Python."""
    _run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    if sys.prefix != sys.base_prefix:  # "system" means the Python below a virtual environment
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
        above = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        Path(packages, "outer_environment.pth").write_text("\n".join(above) + "\n")
    return python


def install(python: Path, architecture: str) -> None:
    """Compile for one architecture ("90") and install in place; raises CalledProcessError when that fails."""
    variables = {"COMMOPT_CUDA": "ON", "COMMOPT_REQUIRE_CUDA": "ON", "CUDAARCHS": f"{architecture}-real"}
    variables["PIP_CONSTRAINT"] = ""  # the tested versions have a torch for CPUs
    command = [str(python), "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    folder = python.parents[1] / f"compiled-{architecture}"  # kept: what has not changed is not compiled again
    _run([*command, f"--config-settings=build-dir={folder}", "--editable", str(ROOT)], variables)


def problem() -> str | None:
    """Return the fault of the compiled kernels of this Python, None when every kernel with a source is there."""
    try:
        names = import_module("commopt._C").names()
    except ImportError as error:
        return f"{error}; compile them: make gpu, or COMMOPT_REQUIRE_CUDA=ON pip install ."
    expected = sources.file_of_kernel()
    if names != sorted(expected):
        return f"compiled, or in csrc, but not both: {', '.join(sorted(expected.keys() ^ set(names)))}; compile again"
    return None


def gpu_architecture() -> str:
    """Return the compute capability of the first GPU as nvcc has it."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    settings = "".join(f"{name}={value} " for name, value in (variables or {}).items())
    print(f"{settings}{shlex.join(command)}", flush=True)
    subprocess.run(command, env={**environment(), **(variables or {})}, cwd=ROOT, check=True)


def main() -> int:
    """Install where that is wanted, then check."""
    parser = CommandParser(prog="python -m bench.gpu.build", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="a virtual environment to make and install into")
    parser.add_argument("--architecture", metavar="XY", help="compute capability, 90 for 9.0 (default: of the GPU)")
    options = parser.parse_args()
    if options.into is None:
        wrong = problem()
        print(f"FAILED {wrong}" if wrong else f"{len(sources.file_of_kernel())} kernels are compiled")
        return 1 if wrong else 0
    python = make_environment(Path(os.path.abspath(options.into)))
    try:
        install(python, options.architecture or gpu_architecture())
        _run([str(python), "-m", "bench.gpu.build"])
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
