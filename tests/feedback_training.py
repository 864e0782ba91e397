# SPDX-License-Identifier: Apache-2.0
"""Training whose every gradient the test chooses, and the books that error feedback must balance."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import DGC, Adam, Aggregator, Cast, Compressed, Hierarchical, HookState, OneBit, PowerSGD, Quantize
from commopt.aggregate.rows import RowFormat

K = TypeVar("K")
Vectors = dict[str, Tensor]  # by parameter name, 1-D
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.002}  # three buckets of Controlled after the first step
BLOCK = 64  # many blocks in a small model

COMPRESSORS: dict[str, commopt.Compressor] = {
    "8 bits": Quantize(8, BLOCK),
    "4 bits": Quantize(4, BLOCK),
    "2 bits": Quantize(2, BLOCK),
    "4 uniform": Quantize(4, BLOCK, "uniform"),
    "stochastic": Quantize(8, BLOCK, rounding="stochastic"),
    "onebit mean": OneBit(BLOCK),
    "onebit rms": OneBit(BLOCK, "rms"),
    "bf16": Cast(torch.bfloat16),
    "top 25%": DGC(0.25),
    "top 5%": DGC(0.05),
}


@dataclass(frozen=True, repr=False)
class Served(Compressed):
    """Sparse rows by way of servers, however short they are."""

    def sends_to_all(self, row: RowFormat, chunk_rows: RowFormat, ranks: int) -> bool:
        return False


def flat(name: str, **options: Any) -> Compressed:
    return Compressed(COMPRESSORS[name], **options)


STRATEGIES: dict[str, Aggregator] = {
    **{name: flat(name) for name in COMPRESSORS},
    **{f"inter {name}": Hierarchical(flat(name)) for name in COMPRESSORS},
    "late 4 bits": Compressed(Quantize(4, BLOCK, start_step=6)),
    "served top 5%": Served(DGC(0.05)),
    "inter served top 5%": Hierarchical(Served(DGC(0.05))),
    "inter adam": Hierarchical(Compressed(OneBit(BLOCK), adam=Adam())),
    "rank 2": PowerSGD(2, start_step=0),
    "inter rank 2": Hierarchical(PowerSGD(2, start_step=0)),
    "inter rank 1": Hierarchical(PowerSGD(1, start_step=0)),
    "late rank 2": PowerSGD(2, start_step=6),
}
MATRICES = ("first.weight", "third.weight")  # of Controlled: all that DGC and PowerSGD compress


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...], bias_numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(bias_numel, dtype=dtype))


class Controlled(nn.Module):
    """The loss is every parameter times its coefficient, so the coefficients are the gradients, exactly.

    The first and second layer are used in another order than they were made in, so DDP's second plan of buckets
    differs from the first.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = Layer((60, 50), 50, dtype)
        self.second = Layer((4097,), 3, dtype)
        self.third = Layer((7, 100), 65, dtype)
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        order = ("second.weight", "first.bias", "third.weight", "gain", "first.weight", "third.bias", "second.bias")
        named = dict(self.named_parameters())
        terms = [(named[name].flatten() * coefficients[name]).sum().float() for name in order if name in coefficients]
        return torch.stack(terms).sum()


class Tied(Controlled):
    """Uses one parameter twice, under two names."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.tied = nn.Module()
        self.tied.weight = self.third.weight

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        once: Tensor = super().forward(coefficients)
        return once + (self.third.weight.flatten() * coefficients["tied.weight"]).sum().float()


TIED = {"tied.weight": "third.weight"}
NUMELS = {name: parameter.numel() for name, parameter in Controlled().named_parameters()}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Vectors:
    """Return one rank's gradients: runs of 100 elements that never change beside runs that are new every step."""
    chosen = {}
    for index, (name, numel) in enumerate(NUMELS.items()):
        always = torch.Generator().manual_seed(1000 * index + rank)
        now = torch.Generator().manual_seed(1_000_000 * (step + 1) + 1000 * index + rank)
        constant, fresh = torch.randn(numel, generator=always), torch.randn(numel, generator=now)
        values = torch.where(torch.arange(numel) // 100 % 2 == 0, constant, fresh)
        chosen[name] = (values * (1 + 0.5 * rank)).to(dtype)
    return chosen


def zero_gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Vectors:
    return {name: torch.zeros(numel, dtype=dtype) for name, numel in NUMELS.items()}


def zeros() -> Vectors:
    return {name: torch.zeros(numel, dtype=torch.float64) for name, numel in NUMELS.items()}


def residuals_of(state: Mapping[str, Any]) -> dict[str, Vectors]:
    """Return one rank's saved residuals by role, as float32 vectors of whole parameters; what it lacks is zero."""
    roles: dict[str, Vectors] = {}
    for role, pieces in state["residuals"].items():
        vectors = roles.setdefault(role, {})
        for key, values in pieces.items():
            name, _, span = key.rpartition("[")
            begin, end = map(int, span.rstrip("]").split(":"))
            vectors.setdefault(name, torch.zeros(NUMELS[name]))[begin:end] += values.float()
    return roles


def residual_of(state: Mapping[str, Any]) -> Vectors:
    """Return the sum of all residuals of one rank, float64; Adam's moments are none."""
    total = zeros()
    for role, vectors in residuals_of(state).items():
        if "exp_avg" in role:
            continue
        for name, values in vectors.items():
            total[name] += values.double()
    return total


def factors_of(state: Mapping[str, Any]) -> dict[tuple[str, str], Tensor]:
    """Return PowerSGD's factors by parameter, and by level and range."""
    factors = {}
    for block in state["factors"]:
        name, begin, end = block["piece"][:3]
        factors[name, f"{block['path']}[{begin}:{end}]"] = block["right"]
    return factors


def same_residuals(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two saved states of a rank hold the same bits: of residuals, moments and factors."""
    return alike(residuals_of(first), residuals_of(second)) and alike(factors_of(first), factors_of(second))


def alike(first: object, second: object) -> bool:
    """Return whether two states, or parts of such, hold the same bits."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(alike(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(alike, first, second))
    return type(first) is type(second) and first == second


class Records(logging.Handler):
    """The warnings that a logger was given."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@dataclass
class Books:
    """What one rank has seen after `steps`, in float64: its share of the means, the results, its residuals."""

    steps: int
    owed: Vectors
    told: Vectors
    residual: Vectors
    residual_nbytes: int
    largest: float


@dataclass
class Training:
    """A DDP model of one rank with its hook, and the books that are kept of it.

    chosen: gives the gradients of one backward; what it leaves out is not used. micros: backwards per step.
    weight: gives the weight of a rank in a step, with that of all others; None for no weights.
    """

    rank: int
    world_size: int
    aggregator: Aggregator
    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: SMALL_BUCKETS)
    chosen: Callable[[int, int, torch.dtype], Vectors] = gradients
    make: Callable[[torch.dtype], nn.Module] = Controlled
    micros: int = 1
    device: str = "cpu"  # of the model; the books are kept on the CPU
    weight: Callable[[int, int], float] | None = None

    def __post_init__(self) -> None:
        self.module = self.make(self.dtype).to(self.device)
        self.ddp = TorchDDP(self.module, **self.options)
        self.comm: HookState = commopt.attach(self.ddp, self.aggregator, scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.steps, self.largest = 0, 0.0
        self.owed, self.told = zeros(), zeros()
        self._digest = hashlib.sha256()

    def step(self, poison: tuple[int, str, int, float] | None = None) -> bool:
        """Do one step; `poison` is (rank, parameter, element, value). Return whether the result was finite."""
        own = [self.chosen(self.rank, self.steps * self.micros + micro, self.dtype) for micro in range(self.micros)]
        if poison is not None and poison[0] == self.rank:
            own[0][poison[1]][poison[2]] = poison[3]
        scale = torch.tensor(self.scaler.get_scale() if self.scaler else 1.0)
        self.optimizer.zero_grad()
        if self.weight is not None:
            self.comm.weight(self.weight(self.rank, self.steps))
        for micro, coefficients in enumerate(own):
            with self.ddp.no_sync() if micro + 1 < self.micros else contextlib.nullcontext():
                loss = self.ddp({name: values.to(self.device) for name, values in coefficients.items()})
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        results = self.results()
        for values in results.values():
            self._digest.update(values.view(torch.uint8).numpy().tobytes())
        finite = all(bool(values.isfinite().all()) for values in results.values())
        if finite:
            self._book(own, results, scale)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite:
            self.optimizer.step()
        self.steps += 1
        return finite

    def _book(self, own: Sequence[Vectors], results: Vectors, scale: Tensor) -> None:
        sums: Vectors = {}
        for coefficients in own:
            for key, values in coefficients.items():
                name = TIED.get(key, key)
                scaled = values * scale.to(self.dtype)
                sums[name] = sums[name] + scaled if name in sums else scaled  # in the order and dtype of autograd
        for name, values in sums.items():
            true = values.double() / scale.double()
            self.owed[name] += true * self.share()
            self.largest = max(self.largest, float(true.abs().max()))
        for name, values in results.items():
            self.told[name] += values.double() / scale.double()
            self.largest = max(self.largest, float(values.abs().max() / scale))

    def share(self) -> float:
        """Return this rank's part of the average."""
        if self.weight is None:
            return 1 / self.world_size
        weights = [self.weight(rank, self.steps) for rank in range(self.world_size)]
        return weights[self.rank] / sum(weights)

    def books(self) -> Books:
        """Return a copy of the books as they are now."""
        owed, told = ({name: values.clone() for name, values in book.items()} for book in (self.owed, self.told))
        nbytes = self.comm.stats()["residual_bytes"]
        return Books(self.steps, owed, told, residual_of(self.comm.state_dict()), nbytes, self.largest)

    def digest(self) -> str:
        """Return a hash of every result so far, or since `forget`, and of the parameters."""
        digest = self._digest.copy()
        for parameter in self.module.parameters():
            digest.update(parameter.detach().flatten().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def results(self) -> Vectors:
        """Return the gradients that the optimizer sees."""
        named = self.module.named_parameters()
        return {name: p.grad.flatten().to("cpu", copy=True) for name, p in named if p.grad is not None}

    def forget(self) -> None:
        """Begin the digest anew."""
        self._digest = hashlib.sha256()


def total(vectors: Sequence[Vectors]) -> Vectors:
    return {name: torch.stack([each[name] for each in vectors]).sum(0) for name in vectors[0]}


def drift(ranks: Sequence[Books]) -> Vectors:
    """Return what is lost: mean gradients so far, less the results so far, less all residuals."""
    owed, residual = total([books.owed for books in ranks]), total([books.residual for books in ranks])
    return {name: owed[name] - ranks[0].told[name] - residual[name] for name in owed}


def assert_conserved(ranks: Sequence[Books], context: object = "") -> None:
    """Check that nothing is lost but float32 roundings: some per element, rank and step, of the largest value."""
    largest = max(max(float(values.abs().max()) for values in books.residual.values()) for books in ranks)
    largest = max(largest, max(books.largest for books in ranks))
    tolerance = 4 * torch.finfo(torch.float32).eps * max(ranks[0].steps, 1) * largest
    for name, lost in drift(ranks).items():
        worst = float(lost.abs().max())
        assert worst <= tolerance, (
            f"{context}: after {ranks[0].steps} steps {name} has lost {worst:.3g} at element "
            f"{int(lost.abs().argmax())}, roundings explain {tolerance:.3g}"
        )


def assert_something_left(ranks: Sequence[Books]) -> None:
    """Check that the books were not trivially balanced."""
    left = total([books.residual for books in ranks])
    assert max(float(values.abs().max()) for values in left.values()) > 1e-4 * ranks[0].largest
