# SPDX-License-Identifier: Apache-2.0
"""A framework that is not installed is named, with the command that installs it; commopt itself needs none of them."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest


@pytest.mark.parametrize(
    ("framework", "remedy"),
    [("lightning", "pip install lightning"), ("transformers", "pip install transformers accelerate")],
)
def test_what_is_missing_is_named(framework: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"commopt.integrations.{framework}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, framework, None)  # as import finds it where there is none
    with pytest.raises(ImportError, match=rf"{name} needs .*no module {framework}.*{remedy}$"):
        import_module(name)


def test_a_fit_of_lightning_begins_with_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Lightning that has no more than the callback's base: the real one is too slow for every test run."""
    name, pytorch = "commopt.integrations.lightning", ModuleType("lightning.pytorch")
    vars(pytorch).update(Callback=object, LightningModule=object, Trainer=object)
    for module, there in (("lightning", ModuleType("lightning")), ("lightning.pytorch", pytorch), (name, None)):
        monkeypatch.setitem(sys.modules, module, there)
    del sys.modules[name]
    lightning: Any = import_module(name)
    loaded: list[Any] = []
    comm = SimpleNamespace(close=lambda: None, load_state_dict=loaded.append, aggregator=None)
    monkeypatch.setattr(lightning, "attach", lambda *_, **options: comm)
    callback = lightning.CommoptCallback("flat")
    callback.load_state_dict({"of": "a checkpoint"})
    trainer = Mock(precision_plugin=None)
    trainer.strategy.model.parameters.return_value = []
    for _ in range(2):
        callback.on_fit_start(trainer, None)
    assert loaded == [{"of": "a checkpoint"}]
