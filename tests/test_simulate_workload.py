"""Workloads: times by hand, from a file, from a measured window; another batch; GPUs; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.schedule import Plan, Unit, Window
from commopt.simulate.gpus import GPUS, Gpu, gpu, usual_efficiency
from commopt.simulate.models import MODELS, Model, Parameter, gpt2, model, resnet50
from commopt.simulate.workload import Workload, of_model, of_window
from commopt.simulate.workload_file import load, save

SLOW = Gpu("slow", {"fp32": 1.0}, 1.0)  # a million FLOPs and a thousand bytes in a microsecond
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
    assert workload.note == "4 x sample at 0.5 of 1 TFLOP/s (slow, fp32)"


def test_the_layout_has_the_shapes_in_the_same_order() -> None:
    shapes = [("last.weight", (4, 5)), ("norm.weight", (5,)), ("first.bias", (5,)), ("first.weight", (5, 10))]
    assert small().layout == Layout.of_parameters(shapes)


def test_gradients_of_another_dtype() -> None:
    workload = small(gradient_dtype=torch.bfloat16)
    assert workload.nbytes == 160
    assert {unit.dtype for unit in workload.units} == {str(torch.bfloat16)}
    assert workload.compute_us == small().compute_us


def test_an_optimizer_of_a_known_time() -> None:
    assert small(optimizer_us=10.0).compute_us == pytest.approx(10 + 720)
    assert small(optimizer_us=0.0).optimizer_us == 0


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_done_after_three_forwards_and_the_optimizer(name: str) -> None:
    subject, a100 = model(name), gpu("a100")
    workload = of_model(subject, a100, 8, "bf16", 0.4)
    forward_us = 8 * subject.forward_flops / (312e6 * 0.4)
    assert workload.compute_us == pytest.approx(20 * subject.numel / 2039e3 + 3 * forward_us)
    assert all(one.ready_us <= next_one.ready_us for one, next_one in pairwise(workload.units))
    assert workload.nbytes == 4 * subject.numel
    assert [unit.names[0] for unit in workload.units] == [each.name for each in reversed(subject.parameters)]


def test_a_published_rate_comes_back_from_its_share_of_the_peak() -> None:
    """ResNet-50 in float32 on V100, 367 images/s (NVIDIA's DeepLearningExamples), is 0.57 of 15.7 TFLOP/s."""
    workload = of_model(resnet50(), gpu("v100"), 128, "fp32", 0.57, optimizer_us=0.0)
    assert 128 / workload.compute_us * 1e6 == pytest.approx(367, rel=0.02)


def test_efficiency_by_default_is_that_of_the_kind_of_model_and_precision() -> None:
    for subject, precision, share in ((resnet50(), "fp16", 0.35), (gpt2(), "fp16", 0.45), (gpt2(), "fp32", 0.55)):
        assert of_model(subject, gpu("a100"), 2, precision) == of_model(subject, gpu("a100"), 2, precision, share)
        assert usual_efficiency(precision, convolutional=subject.convolutional) == share


def test_another_batch_is_what_the_model_says_of_it() -> None:
    for batch in (1, 3, 64):
        scaled, expected = small(4).scaled(batch), small(batch)
        assert ready(scaled) == pytest.approx(ready(expected))
        assert (scaled.samples, scaled.optimizer_us, scaled.layout) == (batch, expected.optimizer_us, expected.layout)
    assert small(4).scaled(4) == small(4)
    assert small(4).scaled(8).note.endswith("; 8 samples from 4")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    measured = of_window(window(), {"a": (2, 5), "b": (3,), "c": ()}, samples=7)
    for workload in (small(), measured, of_model(resnet50(), gpu("h200"), 64)):
        save(workload, tmp_path / "workload.json")
        assert load(tmp_path / "workload.json") == workload
    lines = (tmp_path / "workload.json").read_text().splitlines()
    assert sum('"ready_us"' in line for line in lines) == 161
    assert '"conv1.weight"' in next(line for line in lines if '"ready_us"' in line)


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


def test_a_file_of_flops_is_a_model(tmp_path: Path) -> None:
    rows = [{"name": p.name, "shape": p.shape, "forward_flops": p.forward_flops} for p in SMALL.parameters]
    path = written(tmp_path / "small.json", name="small", samples=4, parameters=rows)
    assert load(path, SLOW, "fp32", 0.5) == small()
    path = written(tmp_path / "small.json", name="small", samples=4, parameters=rows, note="x", optimizer_us=9)
    loaded = load(path, SLOW, "fp32", 0.5)
    assert (loaded.units, loaded.optimizer_us) == (small(optimizer_us=9.0).units, 9)
    assert loaded.note == f"x; {small().note}"


TIMED = {"name": "w", "shape": [2], "ready_us": 1}
COUNTED = {"name": "v", "shape": [2], "forward_flops": 1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2}, "format 2 is not 1"),
        ({"format": None}, "format None is not 1"),
        ({"name": None}, "name is None; it must be text"),
        ({"sample": 3}, "the file has an unknown entry 'sample'; there are format, name, samples"),
        ({"samples": -1}, "samples is -1; it must be a whole number"),
        ({"note": 3}, "note is 3; it must be text"),
        ({"optimizer_us": -1}, "optimizer_us is -1; it must be a finite number"),
        ({"optimizer_us": 41}, "'fc.weight' is ready after 40 us, but the optimizer takes 41 us before"),
        ({"parameters": None}, "parameters must be a list of at least one parameter"),
        ({"parameters": []}, "parameters must be a list of at least one parameter"),
        ({"parameters": [3]}, r"parameters\[0\] is 3 where an object"),
        ({"parameters": [TIMED | {"ready": 1}]}, r"parameters\[0\] has an unknown entry 'ready'"),
        ({"parameters": [TIMED | {"name": 7}]}, r"parameters\[0\]: name is 7"),
        ({"parameters": [TIMED | {"shape": 7}]}, r"parameters\[0\]: shape is 7; it must be a list"),
        ({"parameters": [TIMED | {"shape": [2, "3"]}]}, "parameter 'w': an extent of its shape is '3'"),
        ({"parameters": [TIMED | {"dtype": "int64"}]}, "dtype 'int64' is none that gradients have"),
        ({"parameters": [TIMED | {"dtype": "float3"}]}, "dtype 'float3' is none that gradients have"),
        ({"parameters": [TIMED | {"dtype": 32}]}, r"parameters\[0\]: dtype is 32; it must be text"),
        ({"parameters": [TIMED | {"ready_us": "soon"}]}, "parameter 'w': ready_us is 'soon'"),
        ({"parameters": [TIMED, TIMED]}, "a parameter is in it twice"),
        ({"parameters": [TIMED, COUNTED]}, "parameter 'w' has no forward_flops, and not all have ready_us"),
        ({"parameters": [COUNTED | {"forward_flops": -1}]}, "parameter 'v': forward_flops is -1"),
        ({"parameters": [COUNTED], "samples": None}, "say on which GPU .*, and give samples"),
        (
            {"parameters": [COUNTED, COUNTED | {"name": "w", "dtype": "float16"}]},
            "forward_flops and several dtypes; give one dtype, or ready_us",
        ),
    ],
)
def test_a_broken_file_is_refused_by_name(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"mine\.json: .*{told}"):
        load(written(tmp_path / "mine.json", **changes), SLOW, "fp32")


def test_flops_need_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="say on which GPU"):
        load(written(tmp_path / "mine.json", parameters=[COUNTED]))


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.json cannot be read: No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"text\.json: not JSON"):
        load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match=r"list\.json: the file is \[1\] where an object"):
        load(tmp_path / "list.json")


def window(**changes: Any) -> Window:
    units = (Unit(("c", "b"), 16, 200.0, "torch.float32"), Unit(("a",), 20, 350.0, "torch.float16"))
    facts: dict[str, Any] = {
        "plan": Plan((("c", "b"), ("a",)), "none"),
        "units": units,
        "ready_error_us": (1.0, 1.0),
        "step_us": (500.0, 510.0),
        "exposed_us": (100.0, 110.0),
        "observed": (),
    }
    return Window(**facts | changes)


def test_a_measured_window_is_taken_parameter_by_parameter() -> None:
    workload = of_window(window(), {"a": (2, 5), "b": (3,), "c": (), "unused": (4,)}, name="mine", samples=2)
    assert workload.units == (
        Unit(("c",), 4, 200.0, "torch.float32"),
        Unit(("b",), 12, 200.0, "torch.float32"),
        Unit(("a",), 20, 350.0, "torch.float16"),
    )
    assert workload.layout == Layout.of_parameters([("c", ()), ("b", (3,)), ("a", (2, 5))])
    assert (workload.name, workload.samples, workload.compute_us) == ("mine", 2, 350)
    assert workload.note == "measured, mean of 2 steps"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: of_window(window(), {"a": (2, 5), "c": ()}), "the shape of 'b' is missing"),
        (lambda: of_window(window(), {"a": (2, 5), "b": (4,), "c": ()}), "the unit of 'c' has 16 bytes, .* make 20"),
        (lambda: of_window(window(step_us=(), exposed_us=()), {}), "no step was measured"),
        (lambda: small(0), "workload of small: batch is 0"),
        (lambda: small().scaled(0), "batch is 0; it must be a whole number >= 1"),
        (lambda: of_window(window(), {"a": (10,), "b": (3,), "c": ()}).scaled(2), "does not say for how many samples"),
        (lambda: of_model(SMALL, SLOW, 1, "fp8"), "slow has no figure for 'fp8'; there are fp32"),
        (lambda: of_model(SMALL, SLOW, 1, "fp32", 0.0), "efficiency is 0.0; it must be above 0 and at most 1"),
        (lambda: of_model(SMALL, SLOW, 1, "fp32", 1.1), "efficiency is 1.1"),
        (lambda: of_model(SMALL, SLOW, 1, "fp32", float("nan")), "efficiency is nan"),
        (lambda: small(optimizer_us=-1.0), "optimizer_us is -1.0"),
        (lambda: gpu("a1000"), "GPU 'a1000' is unknown; there are p100, v100"),
        (lambda: Workload("", small().units, small().layout, 4), "workload: name is ''"),
        (lambda: Workload("none", (), Layout(()), 4), "workload 'none' has no parameters"),
        (lambda: Workload("x", small().units, SMALL_FORWARD, 4), "must name the same parameters in order"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        wrong()


def test_gpus_are_found_by_name_and_are_faster_with_fewer_bits() -> None:
    assert {gpu(name).name for name in GPUS} == {
        *("p100", "v100", "t4", "a10", "a100", "h100", "h200"),
        *("rtx3090", "rtx4090"),
    }
    for each in GPUS.values():
        rates = [each.tflops[precision] for precision in ("fp32", "tf32", "fp16") if precision in each.tflops]
        assert rates == sorted(rates)
        assert each.tflops.get("bf16", each.tflops.get("fp16")) == each.tflops.get("fp16")
