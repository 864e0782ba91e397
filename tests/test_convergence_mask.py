# SPDX-License-Identifier: Apache-2.0
"""What `--local-mask` of the convergence benchmark compares: its mask, beside plain torch, its table and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commopt
from bench.evidence.convergence import mask, mask_table, report
from bench.evidence.convergence.report import Run
from commopt.kernels.sparse import SparseRow
from tests.hook_training import Tower, batch_of, loss_of, seeded
from tests.ranks import run
from tests.test_convergence_bench import ENVIRONMENT, RESULTS, made


def rounds_of_the_mask(rank: int, world_size: int, by_size: bool) -> list[int]:
    """Train with a LocalMask beside its equations in plain torch; return how many elements each round sent."""
    average = mask.LocalMask(period=1, by_size=by_size)
    module = seeded(Tower)
    ddp = nn.parallel.DistributedDataParallel(module)
    commopt.attach(ddp, average)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-5)

    def values() -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in module.parameters()])

    theta = values()
    residual = torch.zeros_like(theta)
    counts = []
    for step in range(6):
        loss = loss_of(ddp, batch_of(rank, step))  # the round of the last step comes first
        assert torch.equal(values(), theta), step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left = residual + (theta - values()) / world_size
        seen = theta.bfloat16() != (theta - world_size * left).bfloat16()
        counts.append(int(seen.sum()))
        if by_size:
            seen = torch.zeros_like(seen).index_fill(0, left.abs().topk(counts[-1]).indices, True)
        sent = (left * seen).bfloat16().float()
        residual = left - sent
        total = sent.clone()
        dist.all_reduce(total)
        theta = theta - total
    told = [count for _, count, _ in average.visible.sent]
    assert told == counts[:-1]  # the last round has not begun
    share, nbytes = average.take_sent()
    assert share == pytest.approx(sum(told) / 5 / theta.numel())
    assert nbytes == sum(mask.row_nbytes(theta.numel(), count) for count in told)
    assert average.take_sent() == (0.0, 0)
    return counts


@pytest.mark.parametrize("by_size", [False, True])
def test_what_is_not_sent_waits_in_the_residual(by_size: bool) -> None:
    numel = sum(each.numel() for each in seeded(Tower).parameters())
    for counts in run(rounds_of_the_mask, 2, by_size, nodes=(1, 1)):
        assert all(0 < count < numel for count in counts)


def test_places_travel_in_the_shorter_form() -> None:
    assert mask.row_nbytes(65536, 100) == SparseRow(65536, 100, torch.bfloat16).nbytes
    assert mask.row_nbytes(65536, 30000) == 65536 // 8 + 60000


def made_for_the_mask(name: str, seeds: int) -> list[Run]:
    comparison = mask.comparison(name)
    rates = {
        case.key: abs(case.entry.aggregator.outer.lr - 1.4)
        for case in comparison.rate_cases()
        if isinstance(case.entry.aggregator, commopt.LocalSGD)
    }
    losses = {"LocalSGD": 2.0, "LocalMask": 2.02, "by_size": 2.008, "DGC": 2.01, "Quantize": 2.0004, "windows": 2.0002}
    found = []
    for case in comparison.cases(rates):
        if case.seed < seeds:
            way = case.entry.name
            loss = next(loss for part, loss in reversed(losses.items()) if part in way)
            inter = 2000.0 if "Mask" in way or "compressor" in way else 20000.0
            each = made(way, [loss * (1 + case.seed)], case.seed, inter, case.task.name)
            found.append(replace(each, optimizer="adamw", parameters=1000, density=0.25 if "Mask" in way else None))
    return found


def test_the_mask_is_compared_with_the_largest_seed_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    environment = replace(ENVIRONMENT, settings=mask.comparison("0.001").settings())
    runs = made_for_the_mask("0.001", 2)
    report.write(path, environment, runs)
    share = (2000 * 160 - 8000) / (20000 * 160 - 8000)  # but for the average at the end
    lines = mask_table.markdown(path, path).splitlines()
    cells = [each.strip() for each in lines[3].split("|")[1:-1]]
    assert cells == [
        "0.001",
        "16",
        "2",
        "3.0000 @ 1.4",
        "+0.010 ±0.000 %",
        f"+1.000 ±0.000 %; {share:.3f} (0.250) @ 1.4",
        f"+0.400 ±0.000 %; {share:.3f} (0.250) @ 1.4",
        f"+0.500 ±0.000 %; {share:.3f} (0.446) @ 1.4",
        f"+0.020 ±0.000 %; {share:.3f} @ 1.4",
        "+0.598 ±0.000 %",
        "+0.498 ±0.000 %",
    ]
    assert lines[2:4] == lines[4:6]
    report.write(path, environment, [each for each in runs if "DGC" not in each.strategy or each.seed == 0])
    cells = [each.strip() for each in mask_table.markdown(path).splitlines()[3].split("|")[1:-1]]
    assert cells[7] == f"+0.500 % (n = 1); {share:.3f} (0.446) @ 1.4"
    report.write(path, environment, [each for each in runs if "LocalMask" not in each.strategy])
    with pytest.raises(ValueError, match="no seed that float32 and the mask were trained with"):
        mask_table.markdown(path)


@pytest.mark.parametrize("name", mask.DENSITIES)
def test_what_is_compared_sent_as_many_bytes(name: str) -> None:
    environment, runs = report.read(RESULTS / f"convergence_mask_{name}.json")
    comparison = mask.comparison(name)
    assert environment.settings == comparison.settings()

    def sent(way: commopt.LocalSGD) -> float:
        own = mask_table.runs_of(runs, comparison.task, way).values()
        return sum((each.inter_bytes_per_step or 0) * comparison.task.steps for each in own) / max(len(own), 1)

    for ways in (mask.Ways.of(name, period) for period in mask.PERIODS):
        seeds = [mask_table.runs_of(runs, comparison.task, way).keys() for way in ways.all()[:2]]
        assert len(seeds[0] & seeds[1]) >= 5 or not seeds[1]
        assert sent(ways.dgc) < 1.02 * sent(ways.mask) or not seeds[1]  # a little less: no advantage over the mask
