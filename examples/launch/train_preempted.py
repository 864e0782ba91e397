# SPDX-License-Identifier: Apache-2.0
"""A training that Slurm may stop at any time: told by USR1, it saves, is queued again, and goes on with the same bits.

sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 slurm_preempted.sh train_preempted.py --folder checkpoints
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt


def train(folder: Path, strategy: str, steps: int, every: int, pause_s: float = 0.0) -> str | None:
    """Train on from the checkpoint in the folder; return a digest of all parameters, None when told to stop."""
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    commopt.take_ranks()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    comm = commopt.attach(model, strategy)
    file, first = folder / "training.pt", 0
    saved = commopt.load_checkpoint(file)
    if saved is not None:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        comm.load_state_dict(saved["comm"])
        first = saved["step"]
    if dist.get_rank() == 0:
        print(f"from step {first}", flush=True)
    for step in range(first, steps):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # the same batch again after a stop
        images = torch.randn(32, 64, device=device)
        loss = nn.functional.cross_entropy(model(images), images[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(pause_s)
        stopping = is_told(told, device)
        if stopping or (step + 1) % every == 0:
            kept = commopt.Gathered(comm).state_dict()  # on every rank
            if dist.get_rank() == 0:
                whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "comm": kept}
                commopt.save_checkpoint({**whole, "step": step + 1}, file)
        if stopping:
            queue_again(step + 1)
            return None
    dist.destroy_process_group()
    return digest(model)


def is_told(told: list[int], device: torch.device) -> bool:
    """Return on every rank whether any has been told to stop: signals do not come to all in the same step."""
    count = torch.tensor(len(told), device=device)
    dist.all_reduce(count)  # with many ranks ask every few steps only
    return bool(count)


def queue_again(step: int) -> None:
    """Let Slurm put the job back into its queue, once rank 0 has saved; it ends all ranks then."""
    if dist.get_rank() == 0:
        print(f"told to stop, saved step {step}", flush=True)
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


def digest(model: nn.Module) -> str:
    """Return a digest of all bits of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def command_line(description: str) -> argparse.ArgumentParser:
    """Return what reads the options of a training."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint; all nodes must see it")
    parser.add_argument("--strategy", default="hierarchical_quantized:bits=2", metavar="NAME[:OPTION=VALUE...]")
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer (default 100)")
    parser.add_argument("--every", type=int, default=10, metavar="STEPS", help="between checkpoints (default 10)")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="after each step, for time to stop it")
    return parser


def main() -> None:
    """Train, and print the digest at the end."""
    options = command_line("Train, and go on after the job was stopped.").parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bits = train(options.folder, options.strategy, options.steps, options.every, options.pause)
    if bits is not None and os.environ["RANK"] == "0":
        print(f"bits {bits}", flush=True)


if __name__ == "__main__":
    main()
