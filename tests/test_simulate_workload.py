# SPDX-License-Identifier: Apache-2.0
"""Workloads: times by hand and from a file; another batch; GPUs; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.schedule import Unit
from commopt.simulate import MODELS, GpuSpec, Workload, gpu, load, model, of_model
from commopt.simulate.model_zoo import Model, Parameter
from commopt.simulate.throughput import PUBLISHED, usual_efficiency

SLOW = GpuSpec("slow", {"fp32": 1.0}, 1.0)  # a million FLOPs and a thousand bytes in a microsecond
SMALL = Model(
    "small",
    (
        Parameter("first.weight", (5, 10), 10e6),
        Parameter("first.bias", (5,)),
        Parameter("norm.weight", (5,)),
        Parameter("last.weight", (4, 5), 20e6),
    ),
    "sample",
)
SMALL_FORWARD = Layout.of_parameters((each.name, each.shape) for each in SMALL.parameters)


def small(batch: int = 4, **options: Any) -> Workload:
    return of_model(SMALL, SLOW, batch, "fp32", 0.5, **options)


def ready(workload: Workload) -> dict[str, float]:
    return {unit.names[0]: unit.ready_us for unit in workload.units}


def test_a_step_by_hand() -> None:
    """A million FLOPs of 4 samples take 8 us at half the peak: forward 240, then 320 and 160 for the layers."""
    workload = small()
    optimizer_us = 20 * 80 / 1000  # five passes over 80 elements of 4 bytes
    assert workload.optimizer_us == pytest.approx(optimizer_us)
    begin_us = optimizer_us + 240
    times = [begin_us + 320, begin_us + 320, begin_us + 480, begin_us + 480]
    assert ready(workload) == pytest.approx(
        dict(zip(["last.weight", "norm.weight", "first.bias", "first.weight"], times, strict=True))
    )
    assert list(ready(workload)) == ["last.weight", "norm.weight", "first.bias", "first.weight"]
    assert [unit.nbytes for unit in workload.units] == [80, 20, 20, 200]
    assert workload.compute_us == pytest.approx(721.6)
    assert workload.nbytes == 320
    assert (workload.name, workload.samples) == ("small", 4)
    assert workload.note == "4 x sample at 0.5 of 1 TFLOP/s (slow, fp32), as given"


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_done_after_three_forwards_and_the_optimizer(name: str) -> None:
    subject, a100 = model(name), gpu("a100")
    workload = of_model(subject, a100, 8, "bf16", 0.4)
    forward_us = 8 * subject.forward_flops / (312e6 * 0.4)
    assert workload.compute_us == pytest.approx(20 * subject.numel / 2039e3 + 3 * forward_us)
    assert all(one.ready_us <= next_one.ready_us for one, next_one in pairwise(workload.units))
    assert workload.nbytes == 4 * subject.numel
    assert [unit.names[0] for unit in workload.units] == [each.name for each in reversed(subject.parameters)]


def test_computation_takes_by_default_what_was_published() -> None:
    """NVIDIA's 2,470 images a second are 0.19 of an A100's peak; the simulated rate lacks the optimizer's time only."""
    for name, card, precision, rate in (("resnet50", "a100", "fp16", 2470), ("bert-large", "v100", "fp32", 50)):
        workload = of_model(model(name), gpu(card), 256, precision)
        assert 256e6 / (workload.compute_us - workload.optimizer_us) == pytest.approx(rate)
    share, basis = usual_efficiency(model("resnet50"), gpu("a100"), "bf16")
    assert share == pytest.approx(0.194, abs=5e-4)
    assert basis == "from 2470/s of resnet50 on a100 (NVIDIA)"


def test_another_gpu_is_faster_by_its_peak_or_its_memory_and_another_model_as_efficient_as_its_kin() -> None:
    """Where both GPUs are published, the rule is at most 15 % off."""
    for name, slower, faster in (
        ("resnet50", "v100", "a100"),
        ("resnet50", "rtx3090", "a100"),
        ("bert-large", "v100", "a100"),
    ):
        known = {each.gpu: each for each in PUBLISHED if (each.model, each.precision) == (name, "fp16")}
        scaled = replace(gpu(faster), name="other")
        with patch("commopt.simulate.throughput.PUBLISHED", (known[slower],)):
            share, _ = usual_efficiency(model(name), scaled, "fp16")
        rate = share * 312e12 / (3 * model(name).forward_flops)
        assert rate == pytest.approx(known[faster].samples_per_s, rel=0.15)
    assert (
        usual_efficiency(model("bert-base"), gpu("a100"), "fp16")[0]
        == usual_efficiency(model("bert-large"), gpu("a100"), "fp16")[0]
    )
    with pytest.raises(ConfigurationError, match="no figure for 'fp8'"):
        usual_efficiency(model("gpt2"), gpu("a100"), "fp8")


def test_another_batch_is_what_the_model_says_of_it() -> None:
    for batch in (1, 3, 64):
        scaled, expected = small(4).scaled(batch), small(batch)
        assert ready(scaled) == pytest.approx(ready(expected))
        assert (scaled.samples, scaled.optimizer_us, scaled.layout) == (batch, expected.optimizer_us, expected.layout)
    assert small(4).scaled(4) == small(4)
    assert small(4).scaled(8).note.endswith("; 8 samples from 4")


def written(path: Path, **changes: Any) -> Path:
    parameters = [
        {"name": "conv.weight", "shape": [4, 3, 1, 1], "ready_us": 90},
        {"name": "fc.weight", "shape": [10, 4], "ready_us": 40, "dtype": "float16"},
    ]
    document = {"format": 1, "name": "mine", "samples": 8, "parameters": parameters} | changes
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    return path


def test_a_file_of_times_lists_parameters_in_the_order_of_forward(tmp_path: Path) -> None:
    workload = load(written(tmp_path / "mine.json", samples=None))
    assert workload.units == (
        Unit(("fc.weight",), 80, 40.0, "torch.float16"),
        Unit(("conv.weight",), 48, 90.0, "torch.float32"),
    )
    assert workload.layout == Layout.of_parameters([("fc.weight", (10, 4)), ("conv.weight", (4, 3, 1, 1))])
    assert (workload.name, workload.samples, workload.note, workload.optimizer_us) == ("mine", 0, "", 0)
    assert load(written(tmp_path / "mine.json", optimizer_us=20)).scaled(16).compute_us == 20 + 2 * 70


TIMED = {"name": "w", "shape": [2], "ready_us": 1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"name": None}, "name is None; it must be non-empty text"),
        ({"sample": 3}, "the file has an unknown entry 'sample'; there are format, name, samples"),
        ({"note": 3}, "note is 3; it must be text"),
        ({"optimizer_us": -1}, "optimizer_us is -1; it must be a finite number"),
        ({"optimizer_us": 41}, "'fc.weight' is ready after 40 us, but the optimizer takes 41 us before"),
        ({"parameters": None}, "parameters must be a list of at least one parameter"),
        ({"parameters": [3]}, r"parameters\[0\] is 3 where an object"),
        ({"parameters": [TIMED | {"ready": 1}]}, r"parameters\[0\] has an unknown entry 'ready'"),
        ({"parameters": [TIMED | {"shape": 7}]}, r"parameters\[0\]: shape is 7; it must be a list"),
        ({"parameters": [TIMED | {"shape": [2, "3"]}]}, "parameter 'w': an extent of its shape is '3'"),
        ({"parameters": [TIMED | {"dtype": "int64"}]}, "dtype 'int64' is none that gradients have"),
        ({"parameters": [TIMED | {"dtype": 32}]}, r"parameters\[0\]: dtype is 32; it must be non-empty text"),
        ({"parameters": [TIMED | {"ready_us": "soon"}]}, "parameter 'w': ready_us is 'soon'"),
        ({"parameters": [TIMED, TIMED]}, "a parameter is in it twice"),
        ({"parameters": []}, "workload 'mine' has no parameters"),
    ],
)
def test_a_broken_file_is_refused_by_name(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"mine\.json: .*{told}"):
        load(written(tmp_path / "mine.json", **changes))


def test_a_list_is_no_workload(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"list\.json: the file is \[1\] where an object"):
        load(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: small().scaled(0), "batch is 0; it must be a whole number >= 1"),
        (lambda: replace(small(), samples=0).scaled(2), "does not say for how many samples"),
        (lambda: of_model(SMALL, SLOW, 1, "fp8"), "slow has no figure for 'fp8'; there are fp32"),
        (lambda: of_model(SMALL, SLOW, 1, "fp32", 0.0), "efficiency is 0.0; it must be above 0 and at most 1"),
        (lambda: of_model(SMALL, SLOW, 1, "fp32", float("nan")), "efficiency is nan"),
        (lambda: gpu("a1000"), r"GPU 'a1000' is unknown; did you mean a100 .*\? there are p100, v100"),
        (lambda: Workload("none", (), Layout(()), 4), "workload 'none' has no parameters"),
        (lambda: Workload("x", small().units, SMALL_FORWARD, 4), "must name the same parameters in order"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        wrong()
