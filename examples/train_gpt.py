# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with DDP or FSDP2 (--parallel), and choose how its gradients are averaged.

    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy hierarchical --seconds 60

The model reads bytes (no tokenizer, no download): the source text of Python's own standard library. About 5M
parameters learn the shape of Python code within minutes on a laptop. On several machines start the same command on
each, with torchrun's --nnodes, --node-rank and --master-addr; commopt finds out by itself which ranks share a machine.

The one line that matters is in `choose_averaging`. Everything else is an ordinary training script.
"""

# No `from __future__ import annotations`: what you copy from here may be a hook, whose annotations DDP reads.

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import commopt

PARALLEL = ("ddp", "hsdp", "fsdp")
STRATEGIES = (*PARALLEL, "noop", *commopt.PRESETS)

VOCABULARY = 256  # bytes
CORPUS_BYTES = 8 * 2**20
HELD_OUT_EVERY = 10  # files
HELD_OUT_WINDOWS = 64
WARM_UP_STEPS = 10
WEIGHT_DECAY = 0.1  # of AdamW
LEARNING_RATES = {"adamw": 1e-3, "muon": 1e-3, "sgd": 0.1}


# ------------------------------------------------------------------------------------ 1. the data


def load_corpus() -> tuple[Tensor, Tensor]:
    """Return the training and the held-out text as uint8 [bytes]; whole files are held out, the same everywhere."""
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    budget = CORPUS_BYTES
    for index, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        source = path.read_bytes()[:budget]
        budget -= len(source)
        texts[index % HELD_OUT_EVERY == 0].append(source)
    train, held_out = (torch.frombuffer(bytearray(b"".join(sources)), dtype=torch.uint8) for sources in texts)
    return train, held_out


def windows_at(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut inputs and targets (the next byte), both int64 [len(starts), context], out of `text`."""
    window = text[starts[:, None] + torch.arange(context + 1)].long().to(device)
    return window[:, :-1], window[:, 1:]


# ----------------------------------------------------------------------------------- 2. the model


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, context, width] to the same shape."""
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = split.chunk(3, dim=1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x.add(self.mlp(x))


class GPT(nn.Module):
    """Predict every next token, a byte by default: int64 [batch, context] in, logits [batch, context, 256] out."""

    def __init__(self, layers: int, width: int, context: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.bytes = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads=max(1, width // 64)) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
        nn.init.normal_(self.positions.weight, std=0.02)  # at first, what the bytes are matters more than where

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.head(self.blocks(self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]))
        return logits


# -------------------------------------------------------------------------------- 3. the one line


def strategy_name(text: str) -> str:
    """Return `text` if it names a strategy, "hierarchical_quantized:bits=4" for one; else raise an error that helps."""
    if text not in STRATEGIES:
        try:
            commopt.build_preset(text)
        except commopt.ConfigurationError as error:
            raise argparse.ArgumentTypeError(f"{error}; known strategies: {', '.join(STRATEGIES)}") from error
    return text


def choose_averaging(model: nn.Module, strategy: str, **options: Any) -> commopt.CommState | None:
    """Make `model` average gradients by `strategy`; every rank must call this with the same name and options."""
    if strategy in PARALLEL:  # torch's own averages
        return None
    if strategy == "noop":  # no averaging between nodes, which shows what communication costs
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, noop_hook)
        return None
    return commopt.attach(model, strategy, **options)  # <- this is all it takes; options are not needed


def parallelize(model: "GPT", parallel: str, device: torch.device, bf16: bool = False) -> nn.Module:
    """Return the model under DDP; sharded inside each node ("hsdp"), or over all ranks ("fsdp"), by FSDP2.

    "node" is "hsdp" whose nodes do not communicate. bf16: FSDP2 computes in bfloat16 and reduces in float32.
    """
    if parallel == "ddp":
        if bf16:
            raise SystemExit("--bf16 is for --parallel hsdp and fsdp; leave it out")
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh  # which DDP does not need
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # COMMOPT_RANKS_PER_NODE lets the ranks of one machine pass for several nodes.
    local = int(os.environ.get("COMMOPT_RANKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world = dist.get_world_size()
    if world % local:
        raise SystemExit(f"--parallel {parallel} needs equal nodes; {world} ranks are not a multiple of {local}")
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=("replicate", "shard"))
    if parallel == "fsdp":
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    elif parallel == "node":
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


# -------------------------------------------------------------------------------- 4. the training


def optimizers_of(
    model: nn.Module, name: str, learning_rate: float, betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """Return what trains `model`: Muon the matrices of the blocks and AdamW the rest, or one optimizer for all."""
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9, fused=True)]
    parts: dict[bool, list[Tensor]] = {True: [], False: []}
    for path, each in model.named_parameters():
        parts[name == "muon" and "blocks." in path and each.dim() == 2].append(each)
    adamw = torch.optim.AdamW(parts[False], learning_rate, betas=betas, weight_decay=WEIGHT_DECAY, fused=True)
    return [muon_within_nodes(parts[True], learning_rate), adamw] if parts[True] else [adamw]


def muon_within_nodes(matrices: list[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    """Return torch's Muon. Under HSDP it sees the shards of its own node: of more it would sum parts between nodes."""
    from torch.distributed.tensor import DTensor

    def of_this_node(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
            return tensor
        mesh, shape, stride = tensor.device_mesh["shard"], tensor.shape, tensor.stride()
        local = tensor.to_local().detach()
        return DTensor.from_local(local, mesh, tensor.placements[1:], run_check=False, shape=shape, stride=stride)

    own = [of_this_node(each) for each in matrices]  # the same memory
    # Updates as long as AdamW's, so that one learning rate is for both.
    muon = torch.optim.Muon(own, learning_rate, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")

    def take_gradients(*_: object) -> None:
        for mine, each in zip(own, matrices, strict=True):
            mine.grad = None if each.grad is None else of_this_node(each.grad)

    muon.register_step_pre_hook(take_gradients)
    return muon


class Training:
    """A fresh model, its optimizer and this rank's batches: equal seeds start equal runs, whatever the strategy."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        model = GPT(options.layers, options.width, options.context).to(device)
        self.model: nn.Module = parallelize(model, options.parallel, device, options.bf16)
        self.learning_rate = learning_rate = options.learning_rate or LEARNING_RATES[options.optimizer]
        self.decay_steps = options.decay_steps
        self.optimizers = optimizers_of(self.model, options.optimizer, learning_rate, options.betas)
        self.schedules = [self._schedule(optimizer) for optimizer in self.optimizers]
        self.device = device
        self.batch = options.batch
        self.context = options.context
        self.train, self.held_out = load_corpus()
        self.evaluation = f"{HELD_OUT_WINDOWS} fixed held-out windows of {options.context} bytes"
        # Every rank draws its own batches; they depend on the seed and the rank, not on the strategy.
        self.draws = torch.Generator().manual_seed(options.seed * dist.get_world_size() + dist.get_rank())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that steps first, of all parameters unless Muon is one."""
        return self.optimizers[0]

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        linear = torch.optim.lr_scheduler.LinearLR
        schedules: list[torch.optim.lr_scheduler.LRScheduler]
        schedules = [linear(optimizer, 1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)]
        if self.decay_steps:
            schedules.append(linear(optimizer, 1.0, 0.0, self.decay_steps))
        return torch.optim.lr_scheduler.ChainedScheduler(schedules)

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        if state is not None and state.aggregator is not None and state.aggregator.adam is not None:
            self.optimizers = [state.optimizer(self.model.parameters(), self.learning_rate, WEIGHT_DECAY)]
            self.schedules = [self._schedule(self.optimizer)]

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        starts = torch.randint(len(self.train) - self.context, (self.batch,), generator=self.draws)
        tokens, targets = windows_at(self.train, starts, self.context, self.device)
        loss = cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # gradients are averaged in here, while it runs
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self, windows: int = HELD_OUT_WINDOWS) -> float:
        """Return the mean loss in nats per byte on the same held-out windows each time; all ranks take a share."""
        starts = torch.linspace(0, len(self.held_out) - self.context - 1, windows).long()
        mine = starts[dist.get_rank() :: dist.get_world_size()]
        tokens, targets = windows_at(self.held_out, mine, self.context, self.device)
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        total = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        dist.all_reduce(total)
        return float(total / (windows * self.context))


# ----------------------------------------------------------------------------- 5. the command line


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what `Training` reads from its options; the defaults make about 5M parameters."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64, help="bytes the model sees (default 64)")
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp", help="how the model is spread (default ddp)")
    parser.add_argument("--bf16", action="store_true", help="FSDP2 computes in bfloat16 and reduces in float32")
    parser.add_argument("--batch", type=int, default=2, help="windows per rank and step (default 2)")
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="adamw")
    parser.add_argument("--learning-rate", type=float, help=f"default: {LEARNING_RATES}")
    parser.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), help="of AdamW (default 0.9 0.95)")
    parser.add_argument("--decay-steps", type=int, metavar="STEPS", help="lower it to zero in so many (default: never)")


def start_process_group() -> torch.device:
    """Join the other ranks that the launcher started; NCCL where there are GPUs, gloo otherwise."""
    commopt.take_ranks()  # for srun and mpirun: torchrun sets what torch reads by itself
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """Yield show(fraction, message): a bar on rank 0's terminal; elsewhere it prints each new message."""
    if dist.get_rank() != 0:
        yield lambda fraction, message: None
        return
    if sys.stderr.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), refresh_per_second=2) as progress:
            task = progress.add_task("starting", total=1.0)
            yield lambda fraction, message: progress.update(task, completed=fraction, description=message)
        return
    shown = ""

    def show(fraction: float, message: str) -> None:
        nonlocal shown
        if message != shown:
            print(message, file=sys.stderr, flush=True)
        shown = message

    yield show


def fraction_done(options: argparse.Namespace, step: int, started: float, device: torch.device) -> float:
    """Return how much of the budget is used; rank 0's clock decides, so that all ranks stop after the same step."""
    used = step / options.steps if options.steps else (time.monotonic() - started) / options.seconds
    fraction = torch.tensor(used, dtype=torch.float64, device=device)
    dist.broadcast(fraction, src=0)
    return float(fraction)


def main() -> None:
    """Train for the given number of steps or seconds and show the held-out loss on the way."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's standard library, under torchrun, srun or mpirun."
    )
    parser.add_argument("--strategy", type=strategy_name, default="hierarchical", metavar="NAME[:OPTION=VALUE...]")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="stop after so many steps")
    budget.add_argument("--seconds", type=float, default=60.0, help="stop after so much time (default 60)")
    parser.add_argument("--look-every", type=int, default=20, metavar="STEPS", help="evaluate so often")
    add_model_options(parser)
    options = parser.parse_args()
    for name in ("steps", "look_every"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is not 1 or more")

    device = start_process_group()
    training = Training(options, device)
    state = choose_averaging(training.model, options.strategy)
    training.follow(state)
    step, done, message = 0, 0.0, options.strategy
    started = time.monotonic()
    with progress_bar() as show:
        while done < 1.0:
            training.step()
            step += 1
            done = fraction_done(options, step, started, device)
            if done >= 1.0 or step % options.look_every == 0:
                message = f"{options.strategy}: step {step}, held-out loss {training.held_out_loss():.3f} nats per byte"
            show(min(done, 1.0), message)
    if dist.get_rank() == 0:
        print(f"{message} after {time.monotonic() - started:.1f} s")
        if state is not None:
            print(*(f"  {name}: {value}" for name, value in state.stats().items()), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
