# SPDX-License-Identifier: Apache-2.0
"""Adam's direction of a node's gradient, before it is compressed: residuals are then in units of updates.

Behind the wire Adam would divide by the square root of decoded values, which is flat within a block of signs and lumpy
where few elements are sent. In front of the wire everything after Adam is linear, as error feedback needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate.base import Action, Buffer, call, mark_non_finite
from commopt.aggregate.residuals import scaled, unscaled
from commopt.aggregate.rows import RowFormat
from commopt.compress import ErrorFeedback
from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError
from commopt.feedback import EXP_AVG, EXP_AVG_SQ, BufferContext, Layout, ResidualStore, Spans
from commopt.groups import Team, TeamShape
from commopt.kernels.residual import cache_numel

COMPARE_EVERY_STEPS = 8
_LEAST_WEIGHT = 0.25  # of a new measurement of the agreement


@dataclass(frozen=True, repr=False)
class Adam(ConciseRepr):
    """Adam (arXiv 1412.6980) in each node, before compression; the optimizer behind it is `CommState.optimizer`'s.

    With g_k the mean gradient of node k of K (of rank k, without nodes), at step t:

        m_k = b1 m_k + (1 - b1) g_k          u_k = (m_k / (1 - b1^t)) / (sqrt(v_k / (1 - b2^t)) + eps)
        v_k = b2 v_k + (1 - b2) g_k^2        p_k = f u_k / K + e_k      e_k <- p_k - D(C(p_k))

    and sum_k D(C(p_k)) takes the gradient's place. That is 1-bit Adam's order (arXiv 2102.02888, section 4) with each
    node's own v, which is never frozen. Where nodes differ, v_k holds the noise of one node and not that of their mean,
    so directions are short; f, of each tensor, makes up for it: 1 where all nodes have the same gradient, sqrt(K) where
    they agree on nothing.

    betas: as torch.optim.AdamW's. The second is 0.95 by default and not torch's 0.999, because every measurement was
        made with 0.95, as transformers mostly have it: one bit ended at most 1.2 % above AdamW with the same betas
        (docs/adamw.md). Nothing was measured with 0.999. If you come from AdamW, give its betas.
    eps: as torch.optim.AdamW's.
    clip_norm: the limit of the L2 norm of each node's gradient, to which it is clipped before it enters m and v. A
        bucket cannot wait for the others: the norm of all buckets is estimated by the expectation of v for all, times
        how far this bucket is from its own. So a step with a spike is clipped at once; the first step is not. One
        number is exchanged per step. None for no clipping.

    Keeps m and v in float32 where residuals are kept: once per node, shared out among its ranks. Bias correction counts
    the steps of each parameter. One that rests keeps m, v and its count, as where torch's AdamW finds .grad None: with
    DDP(find_unused_parameters=True) in a step in which its gradient is exactly zero on all ranks, for which they
    exchange 4 bytes a parameter; with FSDP2 in a backward that sends nothing of it. Raises ConfigurationError.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        betas = self.betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is(b) and 0 <= b < 1 for b in betas):
            raise ConfigurationError(f"Adam(betas={betas!r}) must be two numbers from 0 to below 1, as (0.9, 0.95)")
        object.__setattr__(self, "betas", tuple(betas))
        if not _is(self.eps) or not 0 <= self.eps < 1:
            raise ConfigurationError(f"Adam(eps={self.eps!r}) must be at least 0 and below 1, for example 1e-8")
        limit = self.clip_norm
        if limit is not None and not (_is(limit) and isfinite(limit) and limit > 0):
            raise ConfigurationError(f"Adam(clip_norm={limit!r}) must be a norm above 0, or None for no clipping")

    def compares(self, step: int | None) -> bool:
        """Return whether nodes compare their directions in `step` (None: in most)."""
        return step is not None and step % COMPARE_EVERY_STEPS == 0

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return the exchange of how far nodes agree, which is exact, beside that of the directions."""
        if not self.compares(buffer.step):
            return ()
        return call(team, "all_reduce", 2 * len(buffer.layout.pieces) * torch.float32.itemsize)

    def phase(self, step: int, first: int) -> int:
        """Return the earliest step from `first` on with the exchanges of `step`."""
        return next(each for each in range(first, step + 1) if self.compares(each) == self.compares(step))

    def direction(self, buffer: Tensor, team: TeamShape, scale: float, context: BufferContext) -> Tensor:
        """Return this rank's f u_k / K, times the loss scale: float32, in scratch memory; m and v are staged.

        `scale * buffer` is its part of the average.
        """
        store, layout, device = context.store, context.layout, buffer.device
        assert store is not None  # Compressed sees to it
        b1, b2 = self.betas
        share, loss_scale = context.share or 1 / team.size, context.loss_scale
        (m, next_m), (v, next_v) = (context.moment(name, device) for name in (EXP_AVG, EXP_AVG_SQ))
        before, used = _steps_before(context)
        steps = before + (1 if used is None else used)
        if isinstance(steps, Tensor):
            steps = steps.clamp(min=1)  # of a parameter that was never used nothing moves
        correction = [1 - beta**steps for beta in self.betas]
        root = correction[1] ** 0.5
        found = context.scratch.take("direction", layout.numel, torch.float32, device)
        found.copy_(buffer).mul_(unscaled(scale / share, loss_scale))
        if self.clip_norm is not None:
            self._clip(found, _square(v, layout, 1 - b2**before), store)

        step = cache_numel(device)  # a cache still holds what was just written
        least = root * self.eps
        if isinstance(least, Tensor) and least.dim():
            least = _spread(least, layout, device)
        for part in (slice(begin, begin + step) for begin in range(0, layout.numel, step)):
            gradient = found[part]
            torch.lerp(m[part], gradient, 1 - b1, out=next_m[part])
            torch.mul(v[part], b2, out=next_v[part]).addcmul_(gradient, gradient, value=1 - b2)
            denominator = torch.sqrt(next_v[part], out=gradient)
            denominator.add_(least[part] if isinstance(least, Tensor) and least.dim() else least)
            torch.div(next_m[part], denominator, out=denominator)  # times `root` with the factors
        if used is not None:
            unused = _spread(used, layout, device) == 0
            for target, old in ((next_m, m), (next_v, v)):
                torch.where(unused, old, target, out=target)
            found.masked_fill_(unused, 0.0)
        if self.clip_norm is not None:
            store.expected[layout] = share * _square(next_v, layout, correction[1])
        factors = self._factors(team.size, context, device) * (share * root / correction[0])
        factors = scaled(factors, loss_scale)
        if device.type == "cpu":  # where repeat_interleave takes longer than all the rest
            for piece, factor in zip(found.split([piece.numel for piece in layout.pieces]), factors, strict=True):
                piece.mul_(factor)
        else:
            found.mul_(factors.repeat_interleave(_lengths(layout, device), output_size=layout.numel))
        mark_non_finite(found, next_v.max().isfinite())  # where the square overflows, the direction would be zero
        return found

    def compare(
        self,
        direction: Tensor,
        result: Tensor,
        team: TeamShape,
        rows: RowFormat,
        residuals: Sequence[ErrorFeedback | None],
        context: BufferContext,
    ) -> None:
        """Measure, every COMPARE_EVERY_STEPS-th step, how far nodes agree: others' directions against this rank's own.

        With c the cosine of two nodes' directions and a the share of the noise's square that b1 leaves in m, the share
        of a gradient's square that all nodes agree on is h = a c / (1 - c + a c). Collective over `team`: were each
        node to judge alone, one with the longer directions would find the others' too short, and lengthen its own.
        """
        if not self.compares(context.step) or context.store is None:
            return
        assert isinstance(team, Team)
        share = context.share or 1 / team.size
        # Share times the directions of others if they agreed with this rank, less those they sent. Subtracted before
        # it is multiplied: 1 - c is tiny where nodes have one gradient.
        with context.scratch.frame():
            lacks = context.scratch.take("lacks", len(direction), torch.float32, direction.device)
            torch.sub(direction, result, alpha=share, out=lacks)
            for region, residual in zip(rows.regions, residuals, strict=True):
                if residual is not None:
                    _subtract_errors(lacks, residual, region.spans, share)
            lengths = [piece.numel for piece in context.layout.pieces]
            parts = list(zip(direction.split(lengths), lacks.split(lengths), strict=True))
            squares = torch.stack([own.dot(own) for own, _ in parts]) * (1 / share - 1)
            missing = torch.stack([own.dot(lack) for own, lack in parts]) / share
        sums = torch.cat([squares, missing])
        team.all_reduce(sums)
        squares, missing = sums.chunk(2)
        apart = (missing / squares).clamp_(0.0, 1.0)
        b1, (before, used) = self.betas[0], _steps_before(context)
        steps = before + (1 if used is None else used)
        if isinstance(steps, Tensor):
            steps = steps.clamp(min=1).float()
        noise = (1 - b1) / (1 + b1) * (1 + b1**steps) / (1 - b1**steps)
        found = noise * (1 - apart) / (apart + noise * (1 - apart))
        known = self._agreement(context, direction.device)
        weight = max(_LEAST_WEIGHT, 1 / (1 + context.step // COMPARE_EVERY_STEPS))
        staged = context.store.transaction.stage_factors(known)
        staged.copy_(torch.where(squares > 0, torch.lerp(known[:, 0], found, weight), known[:, 0]).unsqueeze(1))

    def _factors(self, nodes: int, context: BufferContext, device: torch.device) -> Tensor:
        """Return f of each piece of the buffer.

        With h the share of a gradient's square that nodes agree on, the mean's square is h + (1 - h) / K of one node's.
        """
        if nodes == 1:
            return torch.ones(len(context.layout.pieces), dtype=torch.float32, device=device)
        agreed = self._agreement(context, device)[:, 0]
        return (agreed + (1 - agreed) / nodes).rsqrt_()

    def _agreement(self, context: BufferContext, device: torch.device) -> Tensor:
        """Return h of each piece of the buffer [pieces, 1]: 1 until it is measured."""
        pieces = len(context.layout.pieces)
        begin = {"left": torch.empty(0, 1, device=device), "right": torch.ones(pieces, 1, device=device)}
        return context.factors(context.layout, 1, (1,) * pieces, lambda side: begin[side].float()).rights

    def _clip(self, gradient: Tensor, here: Tensor, store: ResidualStore) -> None:
        """Scale a node's gradient down where the norm of all of it is likely above the limit; no host waits.

        here: the square of `gradient` by the expectation of v.
        """
        if store.expected_square is None:  # before the first step
            return
        expected = store.expected_square.to(gradient.device)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64) * (expected / here).sqrt()
        factor = (self.clip_norm / norm).clamp(max=1.0)
        gradient.mul_(torch.where(here > 0, factor, 1.0))


def _subtract_errors(lacks: Tensor, residual: ErrorFeedback, spans: Spans, share: float) -> None:
    """Subtract `share` times the errors of an encoding of the elements in `spans` from `lacks`, some at a time."""
    factor, step, done = scaled(share, residual.loss_scale), cache_numel(lacks.device), 0
    for begin, end in spans:
        for first in range(begin, end, step):
            numel = min(step, end - first)
            part = residual.cut(done, done + numel)
            lacks[first : first + numel] -= (part.new - residual.decay * part.old).mul_(factor)
            done += numel


def exchange_norm(store: ResidualStore, team: Team, device: torch.device) -> None:
    """Add up, after the last bucket of a step, the squares that all ranks of `team` expect of the next gradient.

    Collective, for Adam(clip_norm=...). A step that is not finite changes nothing.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for part in store.expected.values():
        total += part
    store.expected.clear()
    team.all_reduce(total)
    known = torch.zeros_like(total) if store.expected_square is None else store.expected_square.to(device)
    store.expected_square = torch.where(total.isfinite(), total, known)


def committed_steps(store: ResidualStore) -> Any:
    """Return how many steps were complete and not dropped; where a GradScaler drops them, float64 on the device."""
    transaction = store.transaction
    dropped = transaction.dropped if transaction.per_step else 0
    return transaction.steps - (dropped if isinstance(dropped, int) else dropped.double())


def _steps_before(context: BufferContext) -> tuple[Any, Tensor | None]:
    """Return how many steps were made of the parameters in a buffer, and which of them are used in this one.

    A number, or float64 on the device: 0-d where all pieces are alike, else [pieces], as the second is then; None where
    all are used. On a CPU the host looks whether they are alike, which takes fewer passes.
    """
    steps = context.steps
    if steps is None:
        assert context.store is not None
        return committed_steps(context.store), None
    before, used = steps.before, steps.used
    if steps.equal:
        return before[0] if before.is_cuda else float(before[0]), None
    here = _places(context.layout, steps.layout, before.device)
    before, used = before[here], None if used is None else used[here].double()
    if not before.is_cuda:
        used = None if used is None or bool(used.all()) else used
        if used is None and bool((before == before[0]).all()):
            return float(before[0]), None
    return before, used


@lru_cache(maxsize=1024)
def _places(layout: Layout, whole: Layout, device: torch.device) -> Tensor:
    """Return which piece of `whole` each piece of `layout` is of: int64 [pieces]."""
    places = {piece.name: place for place, piece in enumerate(whole.pieces)}
    return torch.tensor([places[piece.name] for piece in layout.pieces], dtype=torch.int64, device=device)


def _spread(values: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """Return a value for each element, of those of the pieces: float32."""
    if device.type != "cpu":
        return values.float().repeat_interleave(_lengths(layout, device), output_size=layout.numel)
    spread = torch.empty(layout.numel, dtype=torch.float32, device=device)
    for part, value in zip(spread.split([piece.numel for piece in layout.pieces]), values.tolist(), strict=True):
        part.fill_(value)
    return spread


def _square(v: Tensor, layout: Layout, correction: Any) -> Tensor:
    """Return the square that v, once corrected, expects of a gradient: float64, 0-d."""
    if not isinstance(correction, Tensor) or not correction.dim():
        whole: Tensor = v.sum(dtype=torch.float64) / correction
        return whole
    sums = torch.stack([part.sum(dtype=torch.float64) for part in v.split([piece.numel for piece in layout.pieces])])
    found: Tensor = (sums / correction.clamp(min=torch.finfo(torch.float32).tiny)).sum()
    return found


@lru_cache(maxsize=1024)
def _lengths(layout: Layout, device: torch.device) -> Tensor:
    """Return the lengths of a buffer's pieces, on the device: copied there once."""
    return torch.tensor([piece.numel for piece in layout.pieces], dtype=torch.int64, device=device)


def _is(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
