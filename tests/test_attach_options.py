# SPDX-License-Identifier: Apache-2.0
"""The options of attach: each is described, checked and refused in one place, and all else follows from there."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import commopt
from commopt.attached.options import OPTIONS, PORTABLE_OPTIONS, AttachOptions, ModelKind
from commopt.errors import ConfigurationError
from commopt.schedule import Plan

PLAN = Plan((("weight",),), repr(commopt.Flat()))
GIVEN: dict[str, Any] = {
    "process_group": "a group",
    "ranks_per_node": 2,
    "site": "berlin",
    "scaler": SimpleNamespace(get_scale=None),
    "timeout": 5,
    "plan": PLAN,
    "links": "links.json",
    "record": True,
    "tuned": "tuned.json",
    "weights": "weights",
    "check_every": 10,
    "on_divergence": "raise",
}
REFUSED: dict[ModelKind, set[str]] = {
    "ddp": {"weights"},
    "replicated": {"process_group", "ranks_per_node", "plan", "links", "tuned", "weights"},
    "sharded": {"process_group", "plan", "links", "tuned", "check_every", "on_divergence"},
}
FILES = ("links", "tuned")


@pytest.mark.parametrize("model", REFUSED)
@pytest.mark.parametrize("name", OPTIONS)
def test_models_take_an_option_or_say_why_not(model: ModelKind, name: str) -> None:
    options = AttachOptions(**{name: GIVEN[name]})
    if name in REFUSED[model]:
        with pytest.raises(ConfigurationError, match=rf"^attach\({name}=.* is for .*; leave {name} out$"):
            options.checked(model)
    elif name in FILES:
        with pytest.raises(ConfigurationError, match="cannot be read"):
            options.checked(model)
    else:
        kept = getattr(options.checked(model), name)
        assert kept == (None if name == "process_group" else GIVEN[name])


@pytest.mark.parametrize("model", REFUSED)
def test_ddps_own_buckets_are_a_plan_that_every_model_takes(model: ModelKind) -> None:
    assert AttachOptions(plan="ddp").checked(model).plan == "ddp"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node=0 is not 1 or more"),
        ({"timeout": -1}, "timeout -1 is not between 0"),
        ({"site": "berlin/"}, "site='berlin/' has a level without a name"),
        ({"record": 1}, "record=1 is neither True nor False"),
        ({"scaler": 1024.0}, "scaler is a float"),
        ({"plan": 3}, "plan is a int"),
    ],
)
def test_a_wrong_value_is_named_with_the_rule(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AttachOptions(**wrong).checked()


def test_a_pickle_has_no_object_of_the_process() -> None:
    options = AttachOptions(**GIVEN).portable()
    assert pickle.loads(pickle.dumps(options)) == options
    assert {name for name in OPTIONS if getattr(options, name)} == {*PORTABLE_OPTIONS}
    assert not {"process_group", "scaler", "weights"} & {*PORTABLE_OPTIONS}


def test_the_document_and_help_have_every_option() -> None:
    text = (Path(__file__).parents[1] / "docs" / "usage.md").read_text()
    table = text.partition("## Options of `attach`")[2].partition("\n## ")[0]
    models = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.MULTILINE))
    in_words = {"ddp": "DDP", "ddp replicated sharded": "all", "sharded": "FSDP2 on a 1-D mesh"}
    in_words["ddp replicated"] = "DDP, FSDP2 with replicas"
    in_words["ddp sharded"] = "DDP, FSDP2 on a 1-D mesh"
    takes = {name: " ".join(model for model in REFUSED if name not in REFUSED[model]) for name in OPTIONS}
    assert models == {name: in_words[takes[name]] for name in OPTIONS} | {"dense": "all"}
    help_text = str(inspect.getdoc(commopt.attach))
    assert all(f"\n{name}: " in help_text for name in OPTIONS)
    assert all(
        f"\n{name}: " in str(inspect.getdoc(commopt.HookState.__init__)) for name in OPTIONS if name != "weights"
    )
