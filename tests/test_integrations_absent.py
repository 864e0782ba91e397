# SPDX-License-Identifier: Apache-2.0
"""A framework that is not installed is named, with the command that installs it; commopt itself needs none of them."""

from __future__ import annotations

import sys
from importlib import import_module

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
