"""Let ranks use one GPU at the same time: start NVIDIA's MPS daemon, `python -m bench.gpu.mps FOLDER`.

Without it the ranks of a step take turns. FOLDER, for the daemon's pipes, is there afterwards only if a program could
use the GPU through it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.gpu.runner import MARK, Place, environment

CONTROL = "nvidia-cuda-mps-control"
UNUSABLE = "ranks go on taking turns: no program could use the GPU through MPS"
_USE = "import torch; torch.ones(1, device='cuda').item()"
_TIMEOUT_S = 40


def shared(place: Place) -> dict[str, str]:
    """Return what a program needs in its environment to use the daemon; nothing where none runs."""
    return _pipes(place.mps) if place.mps.exists() else {}


def stop(place: Place) -> None:
    """End the daemon, if one runs."""
    if place.mps.exists():
        _control(place.mps, "quit")
        shutil.rmtree(place.mps, ignore_errors=True)


def _pipes(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _control(folder: Path, command: str | None = None) -> int:
    """Start the daemon, or tell it something; return the status."""
    variables = {name: value for name, value in environment().items() if name != MARK}  # it outlives this step
    options = ["-d"] if command is None else []
    settings = {**variables, **_pipes(folder)}
    try:
        done = subprocess.run([CONTROL, *options], input=command, text=True, env=settings, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{CONTROL}: {error}", file=sys.stderr)
        return 1
    return done.returncode


def main() -> int:
    """Start the daemon and try it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    status = _control(folder)
    if status == 0:
        try:
            command = [sys.executable, "-c", _USE]
            status = subprocess.run(command, env={**os.environ, **_pipes(folder)}, timeout=_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            status = 1
        if status:
            _control(folder, "quit")
    if status:
        shutil.rmtree(folder, ignore_errors=True)
        print(UNUSABLE, file=sys.stderr)
        return 1
    print("ranks share the GPU through MPS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
