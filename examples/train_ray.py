# SPDX-License-Identifier: Apache-2.0
"""Train with Ray Train and one of commopt's hooks; when a worker dies, Ray starts all again from the last checkpoint.

    python examples/train_ray.py --workers 4 --strategy hierarchical_quantized:bits=2    # pip install ".[engines]"

The checkpoint holds model, optimizer and residuals, so in the same world the run ends with the same bits as one without
a failure. In another world the residuals are spread over the workers there: with `--workers 2-8` Ray goes on with as
many as there are nodes for.
"""

# No `from __future__ import annotations`: what you copy from here may be a hook, whose annotations DDP reads.

import argparse
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt


def build_model() -> nn.Module:
    """Return an MLP: float32 [batch, 256] in, logits [batch, 10] out, 1.3 million parameters."""
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))


def train_worker(config: dict[str, Any]) -> None:
    """What Ray calls on each worker: train, and report a checkpoint every so many steps."""
    torch.manual_seed(0)
    rank, device = dist.get_rank(), get_device()
    model = prepare_model(build_model())  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    comm = None
    if not config["stock"]:
        comm = commopt.attach(model, config["strategy"])  # <- after prepare_model
    first = restore(model, optimizer, comm)
    started, timed = time.monotonic(), 0
    for step in range(first, config["steps"]):
        torch.manual_seed(step * dist.get_world_size() + rank)  # a step's batch is the same after a restart
        batch = torch.randn(32, 256, device=device)
        loss = nn.functional.cross_entropy(model(batch), batch[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done, timed = step + 1, timed + 1
        if done % config["every"] == 0 or done == config["steps"]:
            metrics: dict[str, Any] = {
                "loss": loss.item(),
                "step_ms": (time.monotonic() - started) / timed * 1e3,
                "step": done,
            }
            metrics |= {"first": first, "workers": dist.get_world_size(), "bits": digest(model)}
            save(model, optimizer, comm, metrics)
            started, timed = time.monotonic(), 0


def restore(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, comm: commopt.CommState | None) -> int:
    """Load the checkpoint that Ray hands to a worker which it starts again; return the step to begin with."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        saved = commopt.load_checkpoint(Path(folder, "training.pt"))
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if comm is not None:
        comm.load_state_dict(saved["comm"])
    return int(saved["step"])


def save(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    comm: commopt.CommState | None,
    metrics: dict[str, Any],
) -> None:
    """Report the metrics with a checkpoint of all workers' residuals, which the first worker writes."""
    residuals = None
    if comm is not None:
        residuals = commopt.Gathered(comm).state_dict()  # on every worker
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            whole = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "comm": residuals}
            commopt.save_checkpoint({**whole, "step": metrics["step"]}, Path(folder, "training.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        train.report(metrics, checkpoint=checkpoint)


def digest(model: nn.Module) -> str:
    """Return a digest of all bits of the parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def fit(options: argparse.Namespace) -> dict[str, Any]:
    """Train on the workers, start them again when one dies, and return the last metrics."""
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(
            num_workers=options.workers,  # two numbers: as many between them as there are nodes for
            elastic_resize_monitor_interval_s=options.look,
            use_gpu=torch.cuda.is_available(),
        ),
        run_config=RunConfig(
            name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=3)
        ),
    )
    return dict(trainer.fit().metrics or {})


def world(text: str) -> int | tuple[int, int]:
    """Return the workers of "4", or the range of "2-4"."""
    least, dash, most = text.partition("-")
    return (int(least), int(most)) if dash else int(least)


def main() -> None:
    """Train, and print the last metrics."""
    parser = argparse.ArgumentParser(description="Train with Ray Train and one of commopt's hooks.")
    parser.add_argument("--workers", type=world, default=2, metavar="N[-N]", help="at least 2, or a range (default 2)")
    parser.add_argument(
        "--look", type=float, default=60.0, metavar="S", help="for new nodes, with a range (default 60)"
    )
    parser.add_argument("--stock", action="store_true", help="average as DDP does, to compare")
    parser.add_argument("--strategy", default="hierarchical_quantized:bits=4", metavar="NAME[:OPTION=VALUE...]")
    parser.add_argument("--steps", type=int, default=40, help="of the optimizer (default 40)")
    parser.add_argument("--every", type=int, default=10, metavar="STEPS", help="between checkpoints (default 10)")
    parser.add_argument("--storage", default=tempfile.gettempdir(), metavar="FOLDER", help="shared by all nodes")
    parser.add_argument("--name", help="of the run, a folder in there")
    print(fit(parser.parse_args()))


if __name__ == "__main__":
    main()
