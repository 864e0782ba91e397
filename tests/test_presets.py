# SPDX-License-Identifier: Apache-2.0
"""Presets: their options are those of the dataclasses they build, and each is a hook that DDP takes as it is."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import DGC, PRESETS, Cast, Compressed, ConfigurationError, Hierarchical, OneBit, PowerSGD, Quantize
from commopt.attached.options import OPTIONS
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded, train
from tests.ranks import run

FREE = 1024
PARTS: dict[str, tuple[type[Any], ...]] = {
    "flat": (),
    "hierarchical": (),
    "hierarchical_bf16": (),
    "quantized": (Quantize, Compressed),
    "onebit": (OneBit, Compressed),
    "dgc": (DGC, Compressed),
    "powersgd": (PowerSGD,),
    "hierarchical_quantized": (Quantize, Compressed, Hierarchical),
    "hierarchical_onebit": (OneBit, Compressed, Hierarchical),
    "hierarchical_dgc": (DGC, Compressed, Hierarchical),
    "hierarchical_powersgd": (PowerSGD, Hierarchical),
    "auto": (commopt.Auto,),
}
LOCAL = ("diloco", "onebit_local")

OWN = {"hierarchical_bf16": {"rounding", "lossless"}}  # options that a recipe says itself
OF_OUTER: dict[type[Any], set[str]] = {Compressed: {"feedback", "dense", "adam"}, Hierarchical: set()}


def options_of(name: str) -> dict[str, Any]:
    parameters = dict(inspect.signature(PRESETS[name]).parameters)
    assert list(parameters)[:2] == ["state", "bucket"], "which DDP looks for"
    return {option: each.default for option, each in list(parameters.items())[2:]}


def test_every_preset_is_told_of_here() -> None:
    assert PARTS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_options_and_documents_come_from_the_dataclasses(name: str) -> None:
    expected = set(OWN.get(name, ()))
    for kind in PARTS[name]:
        expected |= OF_OUTER.get(kind, {field.name for field in fields(kind)})
        assert str(inspect.getdoc(kind)) in str(PRESETS[name].__doc__)
    assert options_of(name).keys() == expected
    assert PRESETS[name].build(**options_of(name)) == PRESETS[name]()


def test_a_signature_shows_defaults_and_types() -> None:
    shown = str(inspect.signature(commopt.hierarchical_powersgd))
    for part in ("matrix_rank: int = 4", "start_step: int = 2", "feedback: "):
        assert part in shown
    assert options_of("hierarchical_dgc")["min_elements"] == FREE
    assert commopt.hierarchical_dgc() == Hierarchical(Compressed(DGC(min_elements=FREE)))


@pytest.mark.parametrize(
    ("preset", "options", "built"),
    [
        ("powersgd", {"matrix_rank": 8}, PowerSGD(8)),
        (
            "hierarchical_bf16",
            {"rounding": "stochastic"},
            Hierarchical(Compressed(Cast(rounding="stochastic"), feedback=None)),
        ),
        ("hierarchical_bf16", {"lossless": True}, Hierarchical(Compressed(Cast(), feedback=None, packed=True))),
        ("quantized", {"bits": 4, "dense": ("*.bias",)}, Compressed(Quantize(4), dense=("*.bias",))),
        (
            "hierarchical_onebit",
            {"start_step": 9, "feedback": None},
            Hierarchical(Compressed(OneBit(start_step=9), None)),
        ),
    ],
)
def test_options_reach_their_part(preset: str, options: dict[str, Any], built: commopt.Aggregator) -> None:
    assert PRESETS[preset](**options) == built


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: commopt.powersgd(rank=4), "did you mean matrix_rank"),
        (lambda: commopt.quantized(start=4), r"has no option start=4; did you mean .*start_step"),
        (lambda: commopt.flat(zzz=4), r"has no option zzz=4; it takes none, and attach takes"),
        (lambda: commopt.build_preset("hierarchical_powersdg"), "did you mean hierarchical_powersgd"),
        (lambda: commopt.build_preset("zzz"), "is unknown; known presets: auto, dgc"),
        (lambda: commopt.quantized(record=True), "no option of the preset quantized but of attach"),
    ],
)
def test_an_unknown_name_is_told_the_near_ones(ask: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ask()


def test_attach_takes_what_a_state_takes() -> None:
    of_attach = set(inspect.signature(commopt.attach).parameters) - {"model", "choice", "weights", "preset_options"}
    assert of_attach == set(inspect.signature(commopt.HookState).parameters) - {"aggregator", "module"}


def test_the_signature_that_editors_show_has_every_option() -> None:
    tree = ast.parse(inspect.getsource(sys.modules["commopt.hooks.ddp"]))
    overloads = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "attach"]
    assert OPTIONS in [tuple(each.arg for each in overload.args.kwonlyargs) for overload in overloads]


@pytest.mark.parametrize("name", [*PRESETS, *LOCAL])
def test_a_preset_is_pickled_by_name(name: str) -> None:
    preset = getattr(commopt, name)
    assert pickle.loads(pickle.dumps(preset)) is preset


@pytest.mark.parametrize("name", LOCAL)
def test_presets_of_local_sgd_take_its_options(name: str) -> None:
    assert name not in PRESETS  # which average a buffer by itself, too
    preset = getattr(commopt, name)
    assert list(inspect.signature(preset).parameters)[2:] == [field.name for field in fields(commopt.LocalSGD)]
    usual = preset()
    assert isinstance(usual, commopt.LocalSGD)
    assert commopt.build_preset(f"{name}:period=20") == replace(usual, period=20)
    for compressor in (commopt.PowerSGD(8), commopt.Quantize(bits=4), commopt.OneBit()):
        assert commopt.build_preset(f"{name}:compressor={compressor}") == replace(usual, compressor=compressor)
    by_place = commopt.build_preset(f"{name}:compressor=Quantize(4)")
    assert by_place == replace(usual, compressor=commopt.Quantize(4))


KINDS = [kind.__name__ for kind in commopt.COMPRESSORS.values()]


@pytest.mark.parametrize("value", ["Quantise(bits=4)", "Quantize(4, bits=x)", "x.OneBit()", "print()"])
def test_a_value_that_is_no_compressor_is_named(value: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"none of {', '.join(KINDS)}, PowerSGD, Outer"):
        commopt.build_preset(f"diloco:compressor={value}")


def test_a_compressor_with_an_option_that_it_lacks_is_answered() -> None:
    with pytest.raises(ConfigurationError, match="Quantize has no option bit=4; did you mean bits"):
        commopt.build_preset("diloco:compressor=Quantize(bit=4)")


def register_without_a_state(rank: int, world_size: int) -> None:
    ddp = commopt.DistributedDataParallel(seeded(Tower), **SMALL_BUCKET)
    ddp.register_comm_hook(None, commopt.hierarchical)
    train(ddp, rank, world_size, Hierarchical(), steps=3)
    of_torch = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    of_torch.register_comm_hook(None, commopt.hierarchical)
    with pytest.raises(Exception, match=r"needs a HookState: ddp.register_comm_hook\(commopt.HookState\(\)"):
        loss_of(of_torch, batch_of(rank, 0)).backward()


def test_a_preset_alone() -> None:
    run(register_without_a_state, 2, fresh=True)


def test_what_every_preset_costs_the_host_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    options = ["--pairs", "1", "--steps", "2", "--json", str(file)]
    command = [sys.executable, "-m", "bench.evidence.hook_overhead", *options]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parent.parent)
    rows = json.loads(file.read_text())["rows"]
    assert [row["preset"] for row in rows] == list(commopt.PRESETS)
    for row in rows:
        assert row["buckets"] == 64
        assert row["hook_us_per_bucket"] > 0
