# SPDX-License-Identifier: Apache-2.0
"""What is left of AdamW's gap, and where: `python -m bench.evidence.adam_forms --json FILE`, half a minute a training.

Trains the GPT of bench.evidence.convergence in this process as two nodes would, whose gradients are exact means of the
batches of their ranks. What the nodes exchange has several forms: which second moment divides, when momentum is taken,
how directions are lengthened, and how they are encoded. Some ask an oracle, to show what a part of the way costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR

from bench.document import table
from bench.environment import machine
from bench.evidence.accumulated_bias import RESIDUALS, Channel
from bench.evidence.convergence import plan
from bench.output import read_lines, write_results, written_by
from commopt import DGC, Compressor, OneBit, Quantize
from commopt.command_line import Parser, content_of, number, output_file, whole
from commopt.feedback import SAMPLE_EVERY_STEPS
from examples import train_gpt
from examples.train_gpt import GPT, WARM_UP_STEPS, WEIGHT_DECAY, load_corpus, windows_at

NODES = len(plan.RANKS_PER_NODE)
LEARNING_RATE = dict(plan.GPT.learning_rates)["adamw"]
RATES = (2.0, 3.0, 4.0, 6.0)
EPS = 1e-8
_LEAST_WEIGHT = 0.25  # of a new measurement of lengths, as in commopt.Adam
_SKETCH_NUMEL = 32
_HELD_OUT_WINDOWS = 2048  # more than the benchmark's 64: differences are small
_CPU = torch.device("cpu")


class Replica:
    """The GPT, its parameters one vector, matrices first; the batches of all nodes, as the benchmark draws them."""

    def __init__(self, seed: int) -> None:
        parser = Parser()
        train_gpt.add_model_options(parser)
        options = parser.parse_args(plan.GPT.model)
        torch.manual_seed(seed)
        self.model = GPT(options.layers, options.width, options.context)
        parameters = sorted(reversed(list(self.model.parameters())), key=lambda each: each.dim() == 1)
        self.shapes = [tuple(each.shape) for each in parameters]
        self.lengths = [each.numel() for each in parameters]
        self.matrix_numel = sum(each.numel() for each in parameters if each.dim() > 1)
        self.weights = torch.cat([each.detach().flatten() for each in parameters]).requires_grad_()
        self._gradient = torch.zeros_like(self.weights)
        pairs = zip(self.weights.detach().split(self.lengths), self._gradient.split(self.lengths), strict=True)
        for each, (values, gradient) in zip(parameters, pairs, strict=True):
            each.data, each.grad = values.view_as(each), gradient.view_as(each)
        self.context, self._batch = options.context, options.batch
        self._train, self._held_out = load_corpus()
        world = sum(plan.RANKS_PER_NODE)
        self._draws = [torch.Generator().manual_seed(seed * world + rank) for rank in range(world)]

    def gradients(self) -> Tensor:
        """Return every node's gradient on its next batch [nodes, numel]."""
        windows = len(self._train) - self.context
        drawn = [torch.randint(windows, (self._batch,), generator=draw) for draw in self._draws]
        found = []
        for starts in torch.cat(drawn).chunk(NODES):
            tokens, targets = windows_at(self._train, starts, self.context, _CPU)
            self._gradient.zero_()
            cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()).backward()
            found.append(self._gradient.clone())
        return torch.stack(found)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss, in nats per byte."""
        total = torch.zeros(())
        for starts in torch.linspace(0, len(self._held_out) - self.context - 1, _HELD_OUT_WINDOWS).long().split(512):
            tokens, targets = windows_at(self._held_out, starts, self.context, _CPU)
            total += cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return float(total / (_HELD_OUT_WINDOWS * self.context))


# ---------------------------------------------------------------------------------------- second moments


class Own:
    """v of each node's own gradients."""

    def __init__(self, replica: Replica, b2: float) -> None:
        self.replica, self.b2 = replica, b2
        self.v = torch.zeros(NODES, sum(replica.lengths))

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        """Return v, its bias corrected, of every node [nodes, numel], or of all [numel]."""
        self.v.lerp_(gradients.square(), 1 - self.b2)
        self.exchange(step)
        return self.v / (1 - self.b2 ** (step + 1))

    def exchange(self, step: int) -> None:
        """Do what nodes tell each other of v."""

    def see(self, mean_momentum: Tensor, gradients: Tensor) -> None:
        """Take note of the mean momentum that was decoded."""

    @property
    def floats(self) -> float:
        """How many float32 an average step adds to what is sent."""
        return 0.0


class Shared(Own):
    """v of each node, averaged exactly in every so many steps."""

    def __init__(self, every: int, replica: Replica, b2: float) -> None:
        super().__init__(replica, b2)
        self.every = every

    def exchange(self, step: int) -> None:
        if (step + 1) % self.every == 0:
            self.v[:] = self.v.mean(0)

    @property
    def floats(self) -> float:
        return self.v.shape[1] / self.every


class Blocks(Shared):
    """v of each node, so scaled that its sum over a block is the nodes' mean; blocks are of so many elements."""

    def __init__(self, block: int, every: int, replica: Replica, b2: float) -> None:
        super().__init__(every, replica, b2)
        self.block = block

    def exchange(self, step: int) -> None:
        if (step + 1) % self.every:
            return
        numel = self.v.shape[1]
        blocks = pad(self.v, (0, -numel % self.block)).view(NODES, -1, self.block)
        sums = blocks.sum(2, keepdim=True)
        scaled = blocks * torch.where(sums > 0, sums.mean(0) / sums, 1.0)
        self.v.copy_(scaled.flatten(1)[:, :numel])

    @property
    def floats(self) -> float:
        return super().floats / self.block


class Factored(Own):
    """v of all nodes from exact means over rows and columns of the nodes' squares (arXiv 1804.04235, section 3)."""

    def exchange(self, step: int) -> None:
        self.v[:] = self.v.mean(0)  # what rows and columns are means of: factoring comes behind, as all of it is linear

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        corrected = super().follow(gradients, step)[0]
        for part, shape in zip(corrected.split(self.replica.lengths), self.replica.shapes, strict=True):
            if len(shape) > 1:
                matrix = part.view(shape)
                rows, columns = matrix.mean(1), matrix.mean(0)
                torch.outer(rows, columns / rows.mean().clamp_min(1e-30), out=matrix)
        return corrected

    @property
    def floats(self) -> float:
        return float(sum(sum(shape) for shape in self.replica.shapes))


class Exact(Own):
    """The oracle: v of the nodes' mean gradient, as AdamW has it where nothing is compressed."""

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        return super().follow(gradients.mean(0, keepdim=True), step)[0]


class Frozen(Exact):
    """The oracle of so many steps, then no more (1-bit Adam, arXiv 2102.02888, section 4)."""

    def __init__(self, start_step: int, replica: Replica, b2: float) -> None:
        super().__init__(replica, b2)
        self.start_step, self._last = start_step, self.v[0]

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        if step < self.start_step:
            self._last = super().follow(gradients, step)
        return self._last


class Decoded(Own):
    """v of all nodes, of the momentum they decode; one exact number of each tensor says how large the squares are."""

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        if step == 0:
            self.v += (1 - self.b2) * gradients.square().mean(0)  # a dense exchange
        return self.v[0] / (1 - self.b2 ** max(step, 1))

    def see(self, mean_momentum: Tensor, gradients: Tensor) -> None:
        squares = zip(
            mean_momentum.square().split(self.replica.lengths),
            gradients.square().mean(0).split(self.replica.lengths),
            strict=True,
        )
        self.v.lerp_(
            torch.cat([seen * (own.sum() / seen.sum().clamp_min(1e-30)) for seen, own in squares]), 1 - self.b2
        )

    @property
    def floats(self) -> float:
        return float(len(self.replica.lengths))


# ------------------------------------------------------------------------------------------------- forms


class Differences(Channel):
    """Sends what values differ by from what was sent before (EF21, arXiv 2106.05203); nothing is owed."""

    def __init__(self, compressor: Compressor, keep: Any, like: Tensor) -> None:
        super().__init__(compressor, None, like)

    def send(self, values: Tensor, step: int) -> Tensor:
        """Return the sum of what was sent."""
        super().send(values - self.total, step)
        return self.total


@dataclass(frozen=True)
class Form:
    """What nodes exchange. With r = sqrt(v) + eps, g a node's gradient, C the channel, f the length, x the weights:

    momentum "node":   m = b1 m + (1 - b1) g, of each node;   x -= lr mean(C(f m / r))
    momentum "behind": m = b1 m + (1 - b1) mean(C(f g / r));  x -= lr m                     (LaProp, arXiv 2002.04839)
    momentum "common": u = mean(C((b1 m + (1 - b1) g) / r));  x -= lr u;  m = u r           (1-bit Adam's order)

    length: 1, sqrt(nodes), or of each tensor: "exact" from the squares of nodes' gradients and of their mean;
        "sketched" the same of 32 sums with random signs in place of the gradients, in every 8th step; "measured" as
        commopt.Adam does it, from directions.
    """

    second: Callable[[Replica, float], Own]
    compressor: Compressor | None = None
    length: Literal["1", "sqrt(K)", "exact", "sketched", "measured"] = "measured"
    momentum: Literal["node", "behind", "common"] = "node"
    betas: tuple[float, float] = (0.9, 0.95)
    channel: type[Channel] = Channel

    @property
    def oracle(self) -> bool:
        """Whether it takes what only a dense exchange tells, though what it sends is compressed."""
        return self.compressor is not None and (self.second is Exact or self.length == "exact")


_BIT, _LARGEST = OneBit(scale="rms"), DGC(0.015)
_START = 50
DENSE = "AdamW"
TODAY = "one bit, own v"

FORMS: dict[str, Form] = {
    DENSE: Form(Exact, length="1"),
    "AdamW, betas 0.5 and 0.95": Form(Exact, length="1", betas=(0.5, 0.95)),
    "own v, length 1": Form(Own, length="1"),
    "own v, length sqrt(K)": Form(Own, length="sqrt(K)"),
    "own v, length exact": Form(Own, length="exact"),
    "own v, length sketched": Form(Own, length="sketched"),
    "own v": Form(Own),
    "v shared": Form(partial(Shared, 1)),
    "v shared every 8": Form(partial(Shared, 8)),
    "v shared every 32": Form(partial(Shared, 32)),
    "v of rows and columns": Form(Factored),
    "oracle v, momentum behind": Form(Exact, length="1", momentum="behind"),
    "own v, momentum behind": Form(Own, momentum="behind"),
    "one bit, oracle v": Form(Exact, _BIT, "1"),
    "one bit, own v, length 1": Form(Own, _BIT, "1"),
    "one bit, own v, length sqrt(K)": Form(Own, _BIT, "sqrt(K)"),
    "one bit, own v, length exact": Form(Own, _BIT, "exact"),
    TODAY: Form(Own, _BIT),
    "one bit, own v, length sketched": Form(Own, _BIT, "sketched"),
    "one bit, v shared": Form(partial(Shared, 1), _BIT),
    "one bit, v shared every 8": Form(partial(Shared, 8), _BIT),
    "one bit, v shared every 32": Form(partial(Shared, 32), _BIT),
    "one bit, v of rows and columns": Form(Factored, _BIT),
    "one bit, v decoded": Form(Decoded, _BIT, "1"),
    "one bit, own v, blocks of 64": Form(partial(Blocks, 64, 1), _BIT),
    "one bit, own v, blocks of 512 every 8": Form(partial(Blocks, 512, 8), _BIT),
    "one bit, 1-bit Adam, 50 dense steps": Form(
        partial(Frozen, _START), OneBit(scale="rms", start_step=_START), "1", "common"
    ),
    "AdamW, v frozen after 50 steps": Form(partial(Frozen, _START), None, "1"),
    "one bit, oracle v, momentum behind": Form(Exact, _BIT, "1", "behind"),
    "one bit, own v, momentum behind": Form(Own, _BIT, "measured", "behind"),
    "one bit of differences, own v": Form(Own, _BIT, channel=Differences),
    "4 bits of differences, own v": Form(Own, Quantize(bits=4), channel=Differences),
    "one bit, own v, betas 0.5 and 0.95": Form(Own, _BIT, betas=(0.5, 0.95)),
    "top-k, oracle v": Form(Exact, _LARGEST, "1"),
    "top-k, own v": Form(Own, _LARGEST),
    "top-k, own v, momentum behind": Form(Own, _LARGEST, "measured", "behind"),
}


# What costs something: with it, and without.
PRICES: dict[str, tuple[str, str]] = {
    "the mean of directions by own v, not AdamW's direction of the mean": ("own v", DENSE),
    "one bit behind it": (TODAY, "own v"),
    "own v, not shared in every step": ("own v", "v shared"),
    "own v, not shared in every step, with one bit": (TODAY, "one bit, v shared"),
    "own v, not shared in every 32nd step, with one bit": (TODAY, "one bit, v shared every 32"),
    "own v, not scaled to the mean of blocks of 512, with one bit": (TODAY, "one bit, own v, blocks of 512 every 8"),
    "lengths measured, not exact": ("own v", "own v, length exact"),
    "lengths measured, not exact, with one bit": (TODAY, "one bit, own v, length exact"),
    "lengths measured, not sketched, with one bit": (TODAY, "one bit, own v, length sketched"),
    "lengths measured, not left at 1, with one bit": (TODAY, "one bit, own v, length 1"),
    "momentum in the nodes, not behind, with one bit": (TODAY, "one bit, own v, momentum behind"),
    "both, with betas 0.5 and 0.95": ("one bit, own v, betas 0.5 and 0.95", "AdamW, betas 0.5 and 0.95"),
}


class Averaging:
    """A form at work: nodes' gradients in, what the optimizer subtracts out."""

    def __init__(self, form: Form, replica: Replica) -> None:
        self.form, self.lengths = form, replica.lengths
        numel, self._matrices = sum(replica.lengths), slice(replica.matrix_numel)
        self._second = form.second(replica, form.betas[1])
        self._m = torch.zeros(NODES if form.momentum == "node" else 1, numel)
        self._squares = torch.zeros(2, len(replica.lengths))  # of nodes' gradients, of their mean
        self._agreed = torch.ones(len(replica.lengths))
        self._channels: list[Channel] = []
        if form.compressor is not None:
            like = torch.zeros(replica.matrix_numel)
            self._channels = [form.channel(form.compressor, RESIDUALS["float32"], like) for _ in range(NODES)]

    def direction(self, gradients: Tensor, step: int) -> Tensor:
        """Return the mean that nodes have of their directions [numel]."""
        b1 = self.form.betas[0]
        correction = 1 - b1 ** (step + 1)
        root = self._second.follow(gradients, step).sqrt() + EPS
        behind = self.form.momentum == "behind"
        momentum = gradients if behind else self._m.lerp(gradients, 1 - b1) / correction
        if self.form.momentum == "node":
            self._m.lerp_(gradients, 1 - b1)
        own = momentum / root
        for part, length in zip(own.split(self.lengths, 1), self._length(gradients, step).tolist(), strict=True):
            part *= length
        sent = self._sent(own, step)
        self._compare(own, sent, step)
        found = sent.mean(0)
        if behind:
            self._m.lerp_(found, 1 - b1)
            return self._m[0] / correction
        if self.form.momentum == "common":
            self._m[0] = found * root * correction
        self._second.see(found * root, gradients)
        return found

    @property
    def bytes_of_dense(self) -> float | None:
        """What a node sends, as a part of float32 gradients; None where an oracle is asked."""
        if self.form.oracle:
            return None
        numel, matrices = sum(self.lengths), self._matrices.stop
        dense = numel if self.form.compressor is None else numel - matrices
        floats = dense + self._second.floats
        if self.form.length in ("measured", "sketched"):
            each = 2 if self.form.length == "measured" else 1 + _SKETCH_NUMEL
            floats += each * len(self.lengths) / SAMPLE_EVERY_STEPS
        share = floats / numel
        if (compressor := self.form.compressor) is not None:
            whole_numel = -(-matrices // compressor.granularity) * compressor.granularity
            encoded = compressor.payload_nbytes(whole_numel) / (4 * numel)
            started = compressor.start_step / plan.GPT.steps
            share = share + encoded * (1 - started) + matrices / numel * started
        return share

    def _sent(self, own: Tensor, step: int) -> Tensor:
        """Return what arrives of every node's directions."""
        if self.form.compressor is None or self.form.compressor.at(step) is None:
            return own
        sent = own.clone()
        for channel, values in zip(self._channels, sent, strict=True):
            values[self._matrices] = channel.send(values[self._matrices], step)
        return sent

    def _length(self, gradients: Tensor, step: int) -> Tensor:
        """Return f of each tensor."""
        if self.form.length == "exact":
            self._squares.lerp_(_squares(gradients, self.lengths), 1 - self.form.betas[1])
        if self.form.length == "sketched" and step % SAMPLE_EVERY_STEPS == 0:
            sketch = torch.cat([_sketch(part, step) for part in gradients.split(self.lengths, 1)], 1)
            self._squares.lerp_(_squares(sketch, [_SKETCH_NUMEL] * len(self.lengths)), _weight(step))
        if self.form.length in ("exact", "sketched"):
            ratio = self._squares[0] / self._squares[1]
            return ratio.clamp(1.0, NODES).nan_to_num(1.0).sqrt()
        if self.form.length == "measured":
            return (self._agreed + (1 - self._agreed) / NODES).rsqrt()
        return torch.full_like(self._agreed, 1.0 if self.form.length == "1" else sqrt(NODES))

    def _compare(self, own: Tensor, sent: Tensor, step: int) -> None:
        """Measure how far nodes agree, as commopt.Adam.compare does."""
        if step % SAMPLE_EVERY_STEPS:
            return
        others = sent.sum(0) - sent
        alike, squares = (_sums(each.sum(0), self.lengths) for each in (own * others, own.square()))
        cosine = alike / squares.clamp_min(1e-30) / (NODES - 1)
        cosine.clamp_(0.0, 1.0)
        b1 = 0.0 if self.form.momentum == "behind" else self.form.betas[0]
        noise = (1 - b1) / (1 + b1) * (1 + b1 ** (step + 1)) / (1 - b1 ** (step + 1))
        self._agreed.lerp_(noise * cosine / (1 - cosine + noise * cosine), _weight(step))


def _squares(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return, of each tensor, the mean square of the nodes' values [nodes, numel], and the square of their mean."""
    return torch.stack([_sums(values.square().mean(0), lengths), _sums(values.mean(0).square(), lengths)])


def _sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.stack([part.sum() for part in values.split(lengths)])


def _sketch(values: Tensor, step: int) -> Tensor:
    """Return sums of rows [nodes, 32], each with a random sign: what their squares add up to is expected of values'."""
    rows = pad(values, (0, -values.shape[1] % _SKETCH_NUMEL)).unflatten(1, (-1, _SKETCH_NUMEL))
    signs = torch.randint(2, (rows.shape[1],), generator=torch.Generator().manual_seed(step)) * 2.0 - 1
    return torch.einsum("nrs,r->ns", rows, signs)


def _weight(step: int) -> float:
    """Return how much a measurement in every 8th step counts, beside those before."""
    return max(_LEAST_WEIGHT, 1 / (1 + step // SAMPLE_EVERY_STEPS))


# --------------------------------------------------------------------------------------------- trainings


@dataclass(frozen=True)
class Run:
    """One training."""

    form: str
    rate: float
    """Times the benchmark's learning rate."""
    seed: int
    loss: float | None
    """Held out, at the end; None where it is not finite."""
    bytes_of_dense: float | None


def train(form: Form, rate: float, seed: int, steps: int) -> tuple[Replica, Averaging]:
    """Train for so many steps, in which the learning rate falls to zero."""
    replica = Replica(seed)
    averaging = Averaging(form, replica)
    optimizer = torch.optim.SGD([replica.weights], rate * LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = schedule_of(optimizer, steps)
    for step in range(steps):
        replica.weights.grad = averaging.direction(replica.gradients(), step)
        optimizer.step()
        schedule.step()
    return replica, averaging


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> ChainedScheduler:
    """Return the benchmark's: up within 10 steps, and down to zero."""
    return ChainedScheduler(
        [
            LinearLR(optimizer, 1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS),
            LinearLR(optimizer, 1.0, 0.0, steps),
        ]
    )


def resume(path: Path, environment: dict[str, Any]) -> tuple[dict[str, Any], list[Run]]:
    """Return what `path` has, for more to be added; raises ValueError when it was made in another way."""
    if not path.exists():
        return environment, []
    saved, runs = read(path)
    for name in ("steps", "torch"):
        if saved[name] != environment[name]:
            raise ValueError(
                f"{path} was made with {name} {saved[name]}, now it is {environment[name]}; remove it or choose another"
            )
    made = [each["revision"] or "an unrecorded one" for each in (saved, environment)]
    return {**saved, "revision": saved["revision"] if made[1] in made[0] else " and ".join(made)}, runs


def read(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """Return the header and the trainings of a file; raises ValueError when it holds something else."""
    with written_by("bench.evidence.adam_forms --json", path):
        header, rows = read_lines(path, "run")
        return header, [Run(**row) for row in rows]


def measure(path: Path, cases: Iterable[tuple[int, str, float]], steps: int) -> None:
    """Do the trainings that a file lacks, of seeds, forms and rates; write it after each."""
    header = {**machine(), "command": "python -m bench.evidence.adam_forms", "steps": steps}
    header, runs = resume(path, header)
    done = {(run.seed, run.form, run.rate) for run in runs}
    for seed, name, rate in cases:
        if (seed, name, rate) in done:
            continue
        replica, averaging = train(FORMS[name], rate, seed, steps)
        loss = replica.held_out_loss()
        runs.append(Run(name, rate, seed, loss if isfinite(loss) else None, averaging.bytes_of_dense))
        print(f"{name}, rate x {rate:g}, seed {seed}: {loss:.4f}", flush=True)
        write_results(path, header, "run", map(asdict, runs))


# ------------------------------------------------------------------------------------------------ report


Losses = Mapping[float, Mapping[int, float]]
"""By rate and seed."""


def best_rate(by_rate: Losses) -> float:
    """Return the rate with the least mean loss of the seeds that all forms have, of the rates with the most of them."""
    known = {rate: _counted(by_seed) for rate, by_seed in by_rate.items()}
    most = max(map(len, known.values()))
    return min((rate for rate in known if len(known[rate]) == most), key=lambda rate: mean(known[rate].values()))


def _counted(by_seed: Mapping[int, float]) -> dict[int, float]:
    return {seed: by_seed[seed] for seed in plan.SEEDS if seed in by_seed}


def gaps(mine: Mapping[int, float], dense: Mapping[int, float]) -> list[float]:
    """Return by how many per cent each seed's loss is above that of the same seed in `dense`."""
    return [100 * (loss / dense[seed] - 1) for seed, loss in mine.items() if seed in dense]


def at_each_rate(mine: Losses, others: Losses) -> list[float]:
    """Return by how many per cent each loss is above that at the same rate and seed."""
    return [gap for rate in sorted(mine.keys() & others.keys()) for gap in gaps(mine[rate], others[rate])]


def markdown(path: Path) -> str:
    """Return what each part costs, then a row for each form: its loss at each rate, and how far it is above AdamW."""
    header, runs = read(path)
    losses: dict[str, dict[float, dict[int, float]]] = {}
    for run in runs:
        losses.setdefault(run.form, {}).setdefault(run.rate, {})[run.seed] = inf if run.loss is None else run.loss
    if DENSE not in losses:
        raise ValueError(f"{path} has no trainings of {DENSE}, which all are compared with")
    dense, shares = losses[DENSE], {run.form: run.bytes_of_dense for run in runs}
    rates = sorted({run.rate for run in runs})
    rows = []
    for name in (name for name in FORMS if name in losses):
        mine, share = losses[name], shares[name]
        cells = [_cell(mine.get(rate, {})) for rate in rates]
        against = (
            _shown(gaps(_counted(mine[best_rate(mine)]), dense[best_rate(dense)])),
            _shown(at_each_rate(mine, dense)),
        )
        rows.append([name, *cells, *against, "oracle" if share is None else f"{share:.3f}"])
    prices = [[what, *_price(losses, *pair)] for what, pair in PRICES.items() if losses.keys() >= set(pair)]
    columns = ["form", *(f"rate {rate * LEARNING_RATE:g}" for rate in rates), "best", "all rates", "bytes of dense"]
    caption = (
        f"{NODES} nodes in one process, {header['steps']} steps: held-out loss, the mean of seeds 0 to "
        f"{plan.SEEDS[-1]}, or of as many as in brackets. Best: at the best of the rates with the most seeds, against "
        f"{DENSE} at its best, seed by seed. All rates: at the same rate and seed, all that there are. ±: the standard "
        f"error of the mean; in brackets: how many trainings."
    )
    priced = table(["price of", "at its best rate", "all rates"], prices)
    return "\n\n".join([*([priced] if prices else []), table(columns, rows), caption])


def _price(losses: Mapping[str, Losses], mine: str, others: str) -> tuple[str, str]:
    """Return what is lost at `mine`'s best rate, and at every rate of both."""
    rate = best_rate(losses[mine])
    found = gaps(losses[mine][rate], losses[others].get(rate, {}))
    return _shown(found), _shown(at_each_rate(losses[mine], losses[others]))


def _cell(by_seed: Mapping[int, float]) -> str:
    if not (counted := _counted(by_seed)):
        return "-"
    return f"{mean(counted.values()):.3f}" + ("" if len(counted) == len(plan.SEEDS) else f" ({len(counted)})")


def _shown(percents: Sequence[float]) -> str:
    if not all(map(isfinite, percents)):
        return "diverged"
    error = f" ± {stdev(percents) / sqrt(len(percents)):.1f}" if len(percents) > 1 else ""
    return f"{mean(percents):+.1f}{error} % ({len(percents)})" if percents else "-"


def main() -> None:
    """Train and write, or print the table of a file."""
    parser = Parser(prog="python -m bench.evidence.adam_forms", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=FORMS, metavar="FORM", help="one form; may be repeated")
    parser.add_argument("--rates", nargs="+", type=number(), default=RATES, help=f"times {LEARNING_RATE}: {RATES}")
    parser.add_argument("--seeds", type=whole(1), default=len(plan.SEEDS), help="seeds 0, 1, ... (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything with one seed: does it run?")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=output_file, metavar="FILE", help="JSON lines; what is in it is not done again")
    what.add_argument("--report", type=content_of(markdown), metavar="FILE", help="print the table of a file")
    options = parser.parse_args()
    if options.report:
        print(options.report)
        return
    torch.set_num_threads(1)
    (task,) = plan.quick([plan.GPT]) if options.quick else [plan.GPT]
    seeds: Sequence[int] = range(1 if options.quick else options.seeds)
    rates = options.rates[:1] if options.quick else options.rates
    try:
        measure(options.json, product(seeds, options.only or FORMS, rates), task.steps)
    except ValueError as error:
        parser.error(str(error))
    print(markdown(options.json))


if __name__ == "__main__":
    main()
