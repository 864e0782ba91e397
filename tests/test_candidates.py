# SPDX-License-Identifier: Apache-2.0
"""What `auto` may choose from, and how much of a gradient each of them leaves out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commopt import Auto, Compressed, Flat, Hierarchical, PowerSGD, Quantize
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.schedule.candidates import allowed_families, candidates, exact

NODES, NODE = TeamShape.of((2, 2)), TeamShape.of((4,))


def gradient() -> tuple[Layout, Tensor]:
    layout = Layout.of_parameters([("w", (64, 100)), ("b", (1000,))])
    return layout, torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))


def test_only_what_is_exact_and_not_asked_for_in_one_form_may_be_replaced() -> None:
    plain = Hierarchical()
    assert list(exact(plain, NODES).values()) == [plain, Flat()]
    for aggregator, shape in ((plain, NODE), (Flat(), NODES), (Compressed(Quantize(4)), NODES)):
        assert exact(aggregator, shape) == {repr(aggregator): aggregator}
    assert list(exact(Auto(), NODES).values()) == [Flat(), Hierarchical()]
    assert list(exact(Auto(), NODE).values()) == [Flat()]


def test_each_family_has_one_candidate_in_each_form() -> None:
    auto = Auto("quantized+powersgd+bf16")
    families = allowed_families(auto, NODES)
    found = candidates(families, [gradient()], None)
    names = ["bf16", "quantized", "powersgd"]
    assert {each.name for each in found} == {*names, *(f"hierarchical {name}" for name in names)}
    usual = {each.name: each.strategy for each in found}
    assert usual["quantized"] == repr(Compressed(Quantize(4)))
    assert usual["powersgd"] == repr(PowerSGD(4))
    assert allowed_families(Auto(), NODES) == ()


@pytest.mark.parametrize(("limit", "bits"), [(0.05, 8), (0.25, 4), (1.0, 2), (1e-4, None)])
def test_with_a_limit_the_strongest_that_keeps_it_is_the_candidate(limit: float, bits: int | None) -> None:
    found = candidates(allowed_families(Auto("quantized"), NODE), [gradient()], limit)
    assert [each.strategy for each in found] == ([repr(Compressed(Quantize(bits)))] if bits else [])  # type: ignore[arg-type]
    assert all(0 < each.error <= limit for each in found)


def test_a_gradient_that_tells_nothing_is_refused() -> None:
    layout, values = gradient()
    families = allowed_families(Auto("quantized"), NODE)
    for bad, words in ((torch.zeros_like(values), "all gradients are zero"), (values / 0, "not finite")):
        with pytest.raises(FloatingPointError, match=words):
            candidates(families, [(layout, bad)], None)


def test_what_is_left_out_of_a_matrix_is_beyond_the_rank() -> None:
    layout, values = gradient()
    exact_error = float(torch.linalg.svdvals(values[:6400].view(64, 100).double())[4:].square().sum())
    assert PowerSGD(4).squared_error(layout, values) == pytest.approx(exact_error, rel=0.05)
    assert Hierarchical(PowerSGD(4)).squared_error(layout, values) == PowerSGD(4).squared_error(layout, values)
    assert Hierarchical().squared_error(layout, values) == 0.0
