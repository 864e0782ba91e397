# SPDX-License-Identifier: Apache-2.0
"""A script under `commopt run` finds what it would find under python itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commopt.errors import ConfigurationError
from commopt.run.script import Script

SURROUNDINGS = """
import json, sys
class Shape:
    side: int = 3
import __main__
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path0": sys.path[0], "package": __package__,
    "spec": None if __spec__ is None else __spec__.name, "main is me": __main__.Shape is Shape,
    "annotation": str(Shape.__annotations__["side"]), "neighbour": __import__("neighbour").VALUE,
    "doc": __doc__, "optimized": __debug__, "imports": sorted(set(vars(__main__)) - {"__annotations__"}),
}))
"""


@pytest.fixture(autouse=True)
def _no_module_stays() -> Iterator[None]:
    """Every test's `package` lies in a folder of its own; one that stayed would be the next test's."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts" / "package").mkdir(parents=True)
    (tmp_path / "scripts" / "train.py").write_text(SURROUNDINGS)
    (tmp_path / "scripts" / "package" / "__init__.py").write_text("")
    for name in ("train.py", "__main__.py"):
        (tmp_path / "scripts" / "package" / name).write_text(SURROUNDINGS)
    for place in ("scripts", "scripts/package"):
        (tmp_path / place / "neighbour.py").write_text(f"VALUE = {place!r}")
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "train.py")
    return tmp_path


def under_python(arguments: list[str], folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


def under_run(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run it in this process, which finds modules as `python -m commopt` does: in the current folder first."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    is_module = arguments[0] == "-m"
    target, *rest = arguments[1:] if is_module else arguments
    Script(target, tuple(rest), is_module).run()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["scripts/train.py", "--lr", "0.1", "a b"], "."),
        (["train.py"], "scripts"),
        (["link.py"], "."),
        (["-m", "package.train", "-m", "x"], "scripts"),
        (["-m", "package", "x"], "scripts"),
    ],
)
def test_everything_is_as_python_has_it(
    folder: Path,
    arguments: list[str],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = under_run(arguments, folder / place, monkeypatch, capsys)
    assert found == under_python(arguments, folder / place)


def run_text(text: str, tmp_path: Path, *arguments: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    Script(str(script), arguments).run()


@pytest.mark.parametrize(
    ("text", "raises"),
    [("raise KeyError('mine')", KeyError), ("raise SystemExit(7)", SystemExit), ("def", SyntaxError)],
)
def test_exceptions_pass_through_and_nothing_is_left_behind(
    text: str, raises: type[BaseException], tmp_path: Path
) -> None:
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    with pytest.raises(raises):
        run_text(f"import sys; sys.path.append('mine')\n{text}", tmp_path, "x")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_what_is_there_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder / "scripts"))
    Script(str(folder / "link.py")).require_there()
    Script("package.train", is_module=True).require_there()
    with pytest.raises(ConfigurationError, match="there is no file"):
        Script(str(folder / "scripts")).require_there()
    with pytest.raises(ConfigurationError, match="leave -m out"):
        Script("package.test", is_module=True).require_there()


def test_what_the_script_made_lives_as_long_as_the_result(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import weakref\nclass Thing: pass\nthing = Thing()\nThing.seen = weakref.ref(thing)")
    made = Script(str(script)).run()
    seen = made.Thing.seen  # type: ignore[attr-defined]  # the module
    assert seen() is not None
