# SPDX-License-Identifier: Apache-2.0
"""The tutorials' compressor and aggregator keep every promise, by the tests that check those of commopt.

Some of those are called here with the tutorials' classes. The last test puts both into a copy of commopt, as
CONTRIBUTING says, and runs the whole gate there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import commopt
from commopt import AGGREGATORS, COMPRESSORS, PRESETS, Aggregator, Communicator, Compressed, Hierarchical, Layout
from commopt.aggregate import Buffer, Call, call, families
from commopt.cost import Speeds, cost, nominal_links
from commopt.groups import Membership, Team, TeamShape
from commopt.simulate.cluster import GPUS, gpu_work
from examples import new_strategies
from examples.new_aggregator import InOrder
from examples.new_compressor import TopOfBlock
from tests import test_compressors as compressors
from tests import test_contract_aggregators as contract
from tests.copies import GATE, Copy
from tests.feedback_training import Books, Training, assert_conserved, assert_something_left
from tests.overheard import overheard
from tests.ranks import run

NEW: list[Aggregator] = [
    InOrder(),
    Hierarchical(inter=InOrder()),
    Compressed(TopOfBlock(16)),
    Hierarchical(inter=Compressed(TopOfBlock(16), feedback=None)),
]
CODEC: list[Callable[[Any], None]] = [
    *(
        lambda made, numel=numel: compressors.test_elements_past_the_end_count_as_zero(made, 3, numel)
        for numel in (7, 99)
    ),
    compressors.test_rows_are_cut_where_chunks_end,
    compressors.test_gaps_between_rows_change_nothing,
    compressors.test_a_long_call_is_its_blocks,
    *(lambda made, dtype=dtype: compressors.test_dtypes(made, dtype) for dtype in compressors.DTYPES),
    compressors.test_nothing,
    lambda made: compressors.test_residual(made, 3.7, 0.9),
    compressors.test_a_loss_scale_changes_nothing_but_the_scale,
    lambda made: compressors.test_accumulate_adds_in_row_order(made, 5),
    lambda made: compressors.test_recompress_is_accumulate_and_compress(made, 24_000),
]


@pytest.fixture
def registered() -> Iterator[None]:
    before = [(known, dict(known)) for known in (AGGREGATORS, COMPRESSORS, PRESETS)]
    new_strategies.register()
    yield
    for known, entries in before:
        known.clear()
        known.update(entries)  # type: ignore[arg-type]  # of its own


def test_the_compressor_codes_as_promised() -> None:
    for promise in CODEC:
        promise(TopOfBlock(16))


@pytest.mark.parametrize(("world_size", "nodes"), [(4, (2, 2)), (3, (2, 1))], ids=str)
def test_means_are_right_and_bit_identical_and_nan_arrives(world_size: int, nodes: tuple[int, ...]) -> None:
    sizes = {dtype: (1, 1023, 20_001) for dtype in contract.SIZES}
    contract.assert_equal_bits(run(contract.average_everything, world_size, NEW, "cpu", sizes, nodes=nodes))
    run(contract.spread_non_finite, world_size, NEW, "cpu", 3, nodes=nodes)


def compare(rank: int, world_size: int) -> None:
    """Compare what is called with what `calls` says."""
    communicator = Communicator()
    team = communicator._membership.team
    made: list[Call] = []

    def listen(team: Team, primitive: str, nbytes: int, roots: list[int]) -> None:
        made.extend(call(team, primitive, nbytes, *roots))

    for aggregator in NEW:
        made.clear()
        with patch.object(Membership, "compare_call"), overheard(listen):
            communicator.all_reduce(torch.ones(1001), aggregator=aggregator)
        steps = aggregator.calls(Buffer(Layout.anonymous(1001), torch.float32), team)
        assert made == [each for each in steps if isinstance(each, Call)], aggregator


def test_calls_are_what_is_called() -> None:
    run(compare, 4, nodes=(2, 2))


def keep_books(rank: int, world_size: int, aggregator: Aggregator) -> Books:
    training = Training(rank, world_size, aggregator)
    for _ in range(8):
        assert training.step()
    return training.books()


@pytest.mark.parametrize("aggregator", [Compressed(TopOfBlock(16)), Hierarchical(Compressed(TopOfBlock(16)))], ids=str)
def test_nothing_is_lost(aggregator: Aggregator) -> None:
    books = run(keep_books, 4, aggregator, nodes=(2, 2))
    assert_conserved(books)
    assert_something_left(books)


def train(rank: int, world_size: int) -> list[float]:
    new_strategies.register()
    return [new_strategies.train("top_of_block:block=16", 2.0, steps=150), new_strategies.train("in_order", 10.0, 40)]


def test_the_tutorials_train_by_name() -> None:
    for compressed, in_order in run(train, 4, nodes=(2, 2), fresh=True):
        assert compressed < 5
        assert in_order < 5


@pytest.mark.usefixtures("registered")
def test_the_tuner_and_the_simulator_know_them() -> None:
    assert commopt.auto(allow="top_of_block").residual_paths
    tried = families()["top_of_block"]
    assert tried.strengths[tried.usual] == commopt.build_preset("top_of_block") == Compressed(TopOfBlock(64))
    layout, gradient = Layout.of_parameters([("weight", (200, 300))]), torch.randn(60_000)
    errors = [strength.squared_error(layout, gradient) for strength in tried.strengths]
    assert 0 < errors[0] < errors[1] < errors[2] < float(gradient.square().sum())
    assert InOrder().squared_error(layout, gradient) == 0

    shape = TeamShape.of((2, 2))
    links = nominal_links(shape, Speeds(nic_gbps=1, intra_gb_per_s=5))
    prices = [cost(made, 10**6, torch.float32, shape, links).total_us for made in (*tried.strengths, InOrder())]
    assert prices == sorted([*prices[:3]], reverse=True) + prices[3:]
    assert prices[0] < prices[3] < float("inf")
    priced = {key.what for key in gpu_work(GPUS["a100"], tried.strengths, 4)}
    assert {repr(TopOfBlock(block)) for block in (16, 64, 256)} <= priced


def put_in_place(copy: Path, tutorial: str, module: str, registry: str, name: str, made: str) -> None:
    """Copy a tutorial's file into a package of commopt, import its class there, and add a line to the registry."""
    package = copy / "commopt" / module.partition(".")[0]
    shutil.copy(copy / "examples" / f"{tutorial}.py", package / f"{name}.py")
    file = package / "__init__.py"
    source = file.read_text()
    first_import = source.index("from commopt")
    source = f"{source[:first_import]}from commopt.{module} import {made}\n{source[first_import:]}"
    begin = source.index(f"{registry}: dict")
    end = source.index("}", begin)
    file.write_text(f'{source[:end].rstrip().rstrip(",")}, "{name}": {made}{source[end:]}')


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_put_into_commopt_they_pass_the_whole_gate(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy")
    put_in_place(copy.folder, "new_compressor", "compress.top_of_block", "COMPRESSORS", "top_of_block", "TopOfBlock")
    put_in_place(copy.folder, "new_aggregator", "aggregate.in_order", "AGGREGATORS", "in_order", "InOrder")
    for tool in (["ruff", "check", "--fix-only", "--select", "I"], ["ruff", "format"]):  # the order of the imports
        copy.run("-m", *tool, "commopt/compress", "commopt/aggregate")
    for tool in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"], ["mkdocs", "build", "--strict"]):
        copy.run("-m", *tool)
    outcome = copy.test("-m", GATE, processes=4)
    assert outcome.verdict == "passed", outcome.output[-8000:]
