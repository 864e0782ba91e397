# SPDX-License-Identifier: Apache-2.0
"""Links given by hand: what they lack is said at once, on every rank, and never hangs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import ConfigurationError, Links
from commopt.attached.options import AttachOptions
from commopt.cost import Speeds, nominal_links
from commopt.groups import TeamShape
from commopt.schedule.calibration import require_prices
from commopt.schedule.candidates import alternatives
from tests.hook_training import SMALL_BUCKET, Tower, assert_identical, seeded, train
from tests.plan_changes import changing
from tests.ranks import run

SHAPE = TeamShape.of((2, 2))


def links_without(*levels: str) -> Links:
    links = nominal_links(SHAPE, Speeds(nic_gbps=100.0, intra_gb_per_s=200.0))
    assert {"world", "intra", "inter"} == {key.level for key in links.curves}
    return replace(links, curves={key: curve for key, curve in links.curves.items() if key.level not in levels})


@pytest.mark.parametrize("level", ["world", "intra", "inter"])
@pytest.mark.parametrize("known", [True, False], ids=["model", "no model"])
def test_every_level_that_is_used_must_be_there(level: str, known: bool) -> None:
    parameters = dict(Tower().named_parameters()) if known else {}
    strategies = alternatives(commopt.Hierarchical(), SHAPE)
    assert len(strategies) == 2
    require_prices(strategies, parameters, SHAPE, links_without())
    with pytest.raises(ConfigurationError) as raised:
        require_prices(strategies, parameters, SHAPE, links_without(level))
    text = str(raised.value)
    assert text.startswith("links cannot price messages by Hierarchical")
    assert " or Flat() on nodes with 2 + 2 ranks: no figures for " in text
    assert f"at level '{level}'" in text
    assert text.endswith("probe the cluster again; or leave links out, and messages are timed instead")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"links": 3}, "links is a int; use commopt.Links, the path"),
        ({"links": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"plan": 3}, "plan is a int; use 'adaptive', 'ddp', a commopt.Plan"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AttachOptions(**({"plan": "adaptive"} | options)).checked()


def attach_with_links(rank: int, world_size: int, folder: Path) -> tuple[str, str, str, int]:
    links_without("inter").save(folder / f"lacking-{rank}.json")
    links_without().save(folder / f"whole-{rank}.json")
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    with pytest.raises(ConfigurationError) as lacking:
        commopt.attach(ddp, commopt.Hierarchical(), plan="adaptive", links=folder / f"lacking-{rank}.json")
    with pytest.raises(commopt.MismatchError) as differing:
        commopt.attach(
            ddp, commopt.Hierarchical(), plan="adaptive", links=links_without("inter") if rank == 3 else links_without()
        )
    # Where no plans are made nothing is missing, and what is equal in memory and in a file is equal.
    links = links_without() if rank else folder / "whole-0.json"
    assert commopt.HookState(commopt.Hierarchical(), plan="ddp", links=links_without("inter")).plan is None
    with changing():
        state = commopt.attach(ddp, commopt.Hierarchical(), plan="adaptive", links=links)
        digest = train(ddp, rank, world_size, commopt.Hierarchical(), steps=5)
    return str(lacking.value), str(differing.value), digest, len(state.decisions)


def test_attach_refuses_links_that_lack_a_level_on_every_rank(tmp_path: Path) -> None:
    results = run(attach_with_links, 4, tmp_path, nodes=(2, 2), timeout_s=30.0)
    texts = {lacking for lacking, *_ in results}
    assert len(texts) == 1
    assert "no figures for all_reduce at level 'inter'" in texts.pop()
    assert all("ranks disagree about links: rank 3 has" in differing for _, differing, *_ in results)
    assert_identical([digest for *_, digest, _ in results])
    assert [decisions for *_, decisions in results] == [1] * 4
