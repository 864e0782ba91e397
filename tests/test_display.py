# SPDX-License-Identifier: Apache-2.0
"""Tables: none is wider than a terminal of 80 columns, nothing in them is lost, and small numbers keep their digits."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest

import commopt
from bench.kernels.measure import Measurement as Kernel
from bench.kernels.measure import print_table
from commopt.display import WIDTH, aligned, show_table, significant
from commopt.run.cli import show
from commopt.run.models import Trained
from commopt.schedule import Outcome, Tuned, explain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00012345, "0.000123"),
        (0.0095, "0.00950"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (10990.4, "10990"),
        (-0.05, "-0.0500"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_digits_and_no_exponent(value: float, text: str) -> None:
    assert significant(value) == text


def table(dice: random.Random) -> tuple[list[str], list[list[str]], int]:
    columns, left = dice.randint(1, 20), dice.randint(0, 3)
    words = ("hierarchical_quantized:bits=4", "Hierarchical(inter=Compressed(Quantize(bits=4)))", "a", "", "x" * 50)
    headings = [
        " ".join(dice.choices(("step", "ms", "communication", "of"), k=dice.randint(1, 3))) for _ in range(columns)
    ]
    rows = [
        [
            dice.choice(words) if place < left else f"{dice.uniform(0, 10 ** dice.randint(1, 9)):.1f}"
            for place in range(columns)
        ]
        for _ in range(dice.randint(1, 5))
    ]
    return headings, rows, left


@pytest.mark.parametrize("seed", range(40))
def test_no_table_is_wider_than_a_terminal(seed: int) -> None:
    headings, rows, left = table(random.Random(seed))
    lines = aligned(headings, rows, left)
    assert max(map(len, lines)) <= WIDTH
    said = "".join("".join(lines).split())
    for row in rows:
        for cell in row[left:]:
            assert cell in said, "a figure is never broken"
    shown = sorted("".join("".join(row[:left]) for row in rows))
    assert not set(shown) - set(said)


def test_a_narrow_table_stays_as_it_is() -> None:
    rows = [["a", "", "1.0"], ["bcd", "", "22.5"]]
    assert aligned(["name", "none", "step ms"], rows, 1) == ["name  step ms", "a         1.0", "bcd      22.5"]


def test_columns_without_room_follow_below() -> None:
    lines = aligned(["name", *(f"figure{n}" for n in range(20))], [["row", *(str(10**7 + n) for n in range(20))]], 1)
    blank = lines.index("")
    assert lines[blank + 1].split()[:2] == ["name", "figure7"]
    assert lines[blank + 2].split()[:2] == ["row", "10000007"]


def printed(function: Any, *arguments: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    function(*arguments)
    return capsys.readouterr().out.splitlines()


STATS = {"steps": 10, "aggregator": repr(commopt.build_preset("hierarchical_onebit:adam=True")), "intra_bytes": 10}


def test_the_commands_that_have_no_test_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """simulate, bandwidth, probe and the report are looked at where the rest of them is tested."""
    tried = (
        Outcome("hierarchical_quantized:bits=4", STATS["aggregator"], 0.1, 1e6, 1e5, 1e6, 1e5),  # type: ignore[arg-type]
        Outcome("LocalSGD", "LocalSGD(period=16)", 0.1, 1e6, 1e5),
    )
    tuned = Tuned(tried[0].name, ("lossless", "local"), (2, 2), 10, tried, None, "the fastest by far", "adamw")
    table = [line for line in explain(commopt.Auto(), tuned, []).splitlines() if line.startswith(" ") or "  " in line]
    assert table
    stream = io.StringIO()
    record = Trained("GPT2LMHeadModelWithALongName", 0, {**STATS, "inter_bytes": 123456789})
    show([record], stream)
    of_run = stream.getvalue().splitlines()
    shape = io.StringIO()
    rows = [["node", "ranks", "receives at most", "sends at most", "address inside the cluster", "host", "GPUs"]]
    show_table(
        "nodes", [*rows, ["0", "8", "50mbit", "10mbit", "10.200.100.100", "name" * 5, "0-7"]], 0, "a " * 80, shape
    )
    times = (123.4,) * 5
    kernel = Kernel("accumulate sparse", "1.0% as bfloat16, 8 peers", "torch.topk route", 10**9, 1, *times, ())
    of_kernels = printed(print_table, "a title", [kernel], capsys=capsys)
    for lines in (table, of_run, shape.getvalue().splitlines(), of_kernels):
        assert max(map(len, lines)) <= WIDTH, lines
