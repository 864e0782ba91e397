# SPDX-License-Identifier: Apache-2.0
"""What `commopt run` takes from its command line, and what it refuses before anything starts."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import commopt
from commopt.__main__ import main
from commopt.errors import ConfigurationError
from commopt.run.script import Choice
from commopt.schedule import Tuned
from commopt.schedule.decision import Outcome


def test_every_option_of_a_state_is_read_or_refused() -> None:
    for name in inspect.signature(commopt.HookState).parameters:
        with pytest.raises(ConfigurationError, match=name):
            Choice.read("flat", [f"{name}=[]"])


def test_options_are_python_values_or_else_text() -> None:
    settings = ["timeout=2.5", "ranks_per_node=4", "record=True", "plan=adaptive", "bits=4", "dense=('*.bias',)"]
    assert Choice.read("hierarchical_quantized", settings).options == {
        "timeout": 2.5,
        "ranks_per_node": 4,
        "record": True,
        "plan": "adaptive",
        "bits": 4,
        "dense": ("*.bias",),
    }


BAD: list[tuple[str, list[str], str]] = [
    ("hierarchy", [], "preset 'hierarchy' is unknown"),
    ("quantized:bits", [], "is no option=value"),
    ("quantized:bits=5", [], "bits"),
    ("flat", ["bits=4"], "preset flat has no option bits=4"),
    ("flat", ["timeout=-1"], "timeout -1 is not between 0"),
    ("flat", ["ranks_per_node=0"], "ranks_per_node=0 is not 1 or more"),
    ("quantized:bits=" + "-" * 9000 + "1", [], "bits"),
    ("flat", ["record"], "--option 'record' is no OPTION=VALUE"),
    ("flat", ["=3"], "is no OPTION=VALUE"),
    ("flat", ["scaler=1"], r"commopt.attach\(ddp, 'flat', scaler=...\)"),
    ("flat", ["site=berlin"], "site=berlin would be the site of every node; set COMMOPT_SITE on each instead"),
    ("flat", ["process_group=dp"], "no value that a command line can hold"),
    ("flat", ["timeout=soon"], "timeout 'soon' is a str"),
    ("flat", ["timeout=True"], "timeout True is a bool"),
    ("flat", ["ranks_per_node=2.0"], "ranks_per_node 2.0 is a float"),
    ("flat", ["record=1"], "record=1 is neither"),
    ("flat", ["plan=mine.json"], "mine.json cannot be read"),
    ("flat", ["links=a=b.json"], r"a=b\.json' cannot be read|a=b\.json cannot be read"),
    ("auto", ["tuned=none.json"], "none.json"),
]


@pytest.mark.parametrize(("strategy", "settings", "says"), BAD)
def test_what_attach_would_refuse_is_refused_at_once(
    strategy: str, settings: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Choice.read(strategy, settings)
    mark = tmp_path / "started"
    script = tmp_path / "train.py"
    script.write_text(f"open({str(mark)!r}, 'w')")
    given = [each for setting in settings for each in ("--option", setting)]
    assert main(["run", "--strategy", strategy, *given, str(script)]) == 2
    assert not mark.exists()
    message = capsys.readouterr().err
    assert message.startswith("commopt run: ")
    assert message.count("\n") == 1


def test_what_was_tuned_is_read_if_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    assert "tuned" not in Choice.read("auto", [], file).options
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match="tuned"):
        Choice.read("auto", [], file)
    tried = Outcome("flat", "Flat()", 0.0, 1.0, 1.0)
    Tuned("flat", ("lossless",), (2, 2), 10, (tried,), None, "fastest").save(file)
    assert Choice.read("auto", [], file).options == {"tuned": str(file)}
    with pytest.raises(ConfigurationError, match="flat chooses nothing"):
        Choice.read("flat", [], file)
    with pytest.raises(ConfigurationError, match="both say one"):
        Choice.read("auto", [f"tuned={file}"], file)


def test_a_folder_that_is_not_there_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError")
    assert main(["run", "--strategy", "auto", "--tuned", str(tmp_path / "none" / "tuned.json"), str(script)]) == 2
    assert "tuned.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy", "flat"], "no script was named"),
        (["--strategy", "flat", "no/such.py"], "there is no file no/such.py"),
        (["--strategy", "flat", "-m", "no.such.module"], "there is no module no.such.module"),
        (["--strategy", "flat", "-m", "json.nothing"], "there is no module json.nothing"),
    ],
)
def test_a_script_that_is_not_there(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--strategy", "flat", "x" * 5000],
        ["run", "--strategy", "auto", "--tuned", "x" * 5000, __file__],
        ["worker", "--scheduler", "localhost:1", "x" * 5000],
        ["chaos", "--script", "x" * 5000],
        ["doctor", "--script", "x" * 5000],
    ],
)
def test_a_name_that_is_too_long_is_no_file(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"commopt {arguments[0]}: ")
    assert told.count("\n") == 1


def test_what_comes_after_the_script_is_the_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    given = ["--strategy", "other", "--report", "-m", "--", "--help"]
    assert main(["run", "--strategy", "flat", str(script), *given]) == 0
    assert capsys.readouterr().out == f"{given}\n"
