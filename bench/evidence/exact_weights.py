# SPDX-License-Identifier: Apache-2.0
"""How many bytes exact weights take under FSDP2: `... -m bench.evidence.exact_weights --json FILE`.

A small GPT with AdamW, bfloat16 weights, sharded over all ranks of emulated nodes: at each learning rate it is trained
by three forms of `weights=` from the same start, which take their turns, and every bit of the weights is compared:
FSDP's own gathers, differences of 4 bits, and exact differences. Gradients are added up by `flat` in all of them.

    commopt cluster --nodes 2 --ranks-per-node 2 --rate 50mbit -m bench.evidence.exact_weights --json FILE
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import commopt
from bench.command_line import add_files
from bench.document import table
from bench.environment import run_of
from bench.output import read_lines, write_results, written_by
from commopt.command_line import CommandParser, whole
from examples.train_gpt import GPT, load_corpus, windows_at

PROGRAM = "bench.evidence.exact_weights"
_LAYERS, _WIDTH, _CONTEXT, _BATCH = 2, 128, 64, 8
_BEFORE = 150  # steps at 1e-3, where training is not to begin
_TURN = 10  # steps
CASES = ((1e-3, 0), (1e-3, _BEFORE), (1e-4, _BEFORE), (1e-5, _BEFORE))
"""Learning rates, and the steps at 1e-3 before."""

FORMS = {
    "FSDP's own": None,
    "4 bits": commopt.Weights(commopt.Quantize(bits=4), difference=True),
    "exact": commopt.Weights(exact=True),
}


@dataclass(frozen=True)
class Trained:
    """A form of weights in one training.

    share: what crossed for weights, over one crossing of bfloat16 in each step (FSDP's own: two, not measured).
    first_share: without the first crossing, which is raw. equal: whether weights and losses have the bits of FSDP's.
    """

    rate: float
    before: int
    form: str
    steps: int
    share: float
    first_share: float
    step_ms: float
    loss: float
    equal: bool


class Training:
    """One model with one form of weights."""

    def __init__(self, form: str, rate: float, start: dict[str, Tensor]) -> None:
        model = new_model()
        model.load_state_dict(start)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model: nn.Module = model
        self.state = commopt.attach(self.model, "flat", weights=FORMS[form])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate)
        self.draws = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.first_nbytes = 0

    def turn(self, text: Tensor) -> None:
        """Take some steps."""
        dist.barrier()
        for _ in range(_TURN):
            began = perf_counter()
            self.losses.append(step(self.model, self.optimizer, text, self.draws))
            self.step_s.append(perf_counter() - began)
            self.first_nbytes = self.first_nbytes or self.state.stats()["inter_bytes"]

    def weights(self) -> list[Tensor]:
        """Return this rank's bits."""
        return [each.to_local().detach().view(torch.int32) for each in self.model.parameters()]  # type: ignore[attr-defined]


def new_model() -> GPT:
    """Return the model as all ranks begin with it."""
    torch.manual_seed(0)
    return GPT(_LAYERS, _WIDTH, _CONTEXT)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, draws: torch.Generator) -> float:
    """Take a step on the next batch, and return its loss."""
    starts = torch.randint(len(text) - _CONTEXT, (_BATCH,), generator=draws)
    tokens, targets = windows_at(text, starts, _CONTEXT, torch.device("cpu"))
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def started(steps: int, text: Tensor) -> dict[str, Tensor]:
    """Return the weights after some steps at 1e-3, the same on every rank: each takes them alone."""
    model, draws = new_model(), torch.Generator().manual_seed(99)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        step(model, optimizer, text, draws)
    found = model.state_dict()
    for values in found.values():
        dist.broadcast(values, 0)
    return found


def everywhere(holds: bool) -> bool:
    """Return whether it holds on all ranks."""
    found = torch.tensor([int(holds)])
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def measure(rate: float, before: int, steps: int, text: Tensor) -> list[Trained]:
    """Train in all forms, in turns."""
    start = started(before, text)
    trainings = {form: Training(form, rate, start) for form in FORMS}
    for _ in range(steps // _TURN):
        for training in trainings.values():
            training.turn(text)
    own, found = trainings["FSDP's own"], []
    taken = len(own.losses)
    shards = sum(each.numel() for each in own.weights())  # this rank's, sent to one rank of the other node
    for form, training in trainings.items():
        sent = training.state.stats()["inter_bytes"] - own.state.stats()["inter_bytes"]
        first = training.first_nbytes - own.first_nbytes
        same = all(torch.equal(*pair) for pair in zip(training.weights(), own.weights(), strict=True))
        found.append(
            Trained(
                rate,
                before,
                form,
                taken,
                sent / (2 * shards * taken) if form != "FSDP's own" else 2.0,
                (sent - first) / (2 * shards * (taken - 1)) if form != "FSDP's own" else 2.0,
                1e3 * median(training.step_s[_TURN:] or training.step_s),
                training.losses[-1],
                everywhere(same and training.losses == own.losses),
            )
        )
        training.state.close()
    return found


def markdown(path: Path) -> str:
    """Return a row for each learning rate and form."""
    with written_by(PROGRAM, path):
        rows = [Trained(**row) for row in read_lines(path, "trained")[1]]
    shown = [
        [
            f"{each.rate:g}, {'from the start' if not each.before else f'after {each.before} steps at 1e-3'}",
            each.form,
            f"{each.share:.3f}",
            f"{each.first_share:.3f}",
            "yes" if each.equal else "no",
            f"{each.step_ms:.0f}",
        ]
        for each in rows
    ]
    headings = ["learning rate", "weights", "of bfloat16's bytes", "without the first step", "same bits", "step ms"]
    caption = (
        f"{rows[0].steps} steps. Bytes are those of weights between nodes, over one crossing of bfloat16 in each step; "
        "FSDP itself crosses twice."
    )
    return f"{table(headings, shown)}\n\n{caption}"


def main() -> None:
    """Measure on all ranks and write, or print the table of a file."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=whole(_TURN), default=100, help="default %(default)s")
    add_files(parser, markdown)
    options: Any = parser.parse_args()
    if options.report:
        print(options.report)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = load_corpus()[0]
    rows = [asdict(row) for case in CASES for row in measure(*case, options.steps, text)]
    if dist.get_rank() == 0:
        write_results(options.json, run_of(PROGRAM), "trained", rows)
        print(markdown(options.json))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
