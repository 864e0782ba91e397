# SPDX-License-Identifier: Apache-2.0
"""Every command with arguments, files and environments it cannot use: one line on stderr, status 2, no traceback.

Each case calls a command's main() in this process with its work taken out: what measures, trains or starts processes
ends the case as "started". Cases are drawn from a seed, so that a failure can be run again by its number.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import commopt.__main__
import topology.__main__
from commopt.command_line import BAD_INPUT, CommandParser, number, parse_nbytes, require_writable, whole
from commopt.cost import Speeds, nominal_links
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from commopt.schedule import Outcome, Plan, Tuned
from tests.doctor_machine import tcp_server
from tests.machines import rail_machine
from tests.matrices import all_pairs, matrix

PER_COMMAND = 110
BATCH = 22

# fmt: off
NUMBERS = (
    "0", "1", "2", "7", "64", "-1", "1.5", "1e400", "1" * 401, "9" * 6000, "nan", "inf", "-inf", "1_000",
    "\u0663",
)
TEXTS = (
    *("", " ", "-", "--", "=", ":", ",", "a,b", "x" * 9000, "\n", "a\nb", "\x00", "\u2028", "\U0001f4a5", "None", "'"),
    *("flat", "hierarchical", "auto", "auto:allow=lossy", "hierarchical_quantized:bits=4", "quantized:bits=3"),
    *("quantized:bits=" + "-" * 9000 + "1", "quantized:bits=" + "(" * 9000, "quantized:bits", "dgc:density=[1]"),
    *("powersgd:matrix_rank=1e400", "hierarchical:inter=5", "quantized:feedback=3", "quantized:dense=7", "onebit:x=1"),
    *("stock", "lossless", "lossy", "ddp", "8G", "4K", "1T", "25gbps", "200GBps", "1gbit", "none", "5ms", "1..4"),
    *("4..1", "plan=ddp", "timeout=-1", "timeout=1e400", "ranks_per_node=0", "ranks_per_node=" + "9" * 400, "scaler=1"),
    *("=3", "links=nowhere.json", "record=5", "bits=8", "tuned=7", "float", "avg", "all_reduce", "resnet50", "gpt2"),
    *("a100", "-m", "quantized:block={[]}", "auto:allow=[[1]]", "hierarchical_bf16:lossless=false"),
)
RENDEZVOUS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {"RANK": "x", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "y"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    {**RENDEZVOUS, "MASTER_PORT": "99999999"},
    {**RENDEZVOUS, "MASTER_PORT": "http"},
)
BAD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**400, float("nan"), float("inf"), "", "x", [], {}, [[]], 10**30,
)
# fmt: on


class StartedError(BaseException):
    """The command would begin its work now."""


def started(*_: object, **__: object) -> Any:
    raise StartedError


@dataclass(frozen=True)
class Command:
    """main: what runs it, given the arguments; work: what is taken out of it, as (object, attribute)."""

    name: str
    main: Callable[[list[str]], Any]
    work: tuple[tuple[str, str], ...] = ()


def of_module(name: str, function: str = "main") -> Callable[[list[str]], Any]:
    """Call a function that reads sys.argv."""

    def call(arguments: list[str]) -> Any:
        module = importlib.import_module(name)
        sys.argv = [name, *arguments]
        return getattr(module, function)()

    return call


def of_commopt(name: str) -> Callable[[list[str]], Any]:
    return lambda arguments: commopt.__main__.main([name, *arguments])


PARSED = (("commopt.command_line.CommandParser", "parse_known_args"),)
WORK = {
    "doctor": ("commopt.doctor.cli", "gather"),
    "probe": ("commopt.probe.cli", "survey"),
    "run": ("commopt.run.script.Script", "run"),
    "scheduler": ("commopt.server_commands", "Scheduler"),
    "server": ("commopt.server_commands", "Server"),
    "worker": ("commopt.run.script.Script", "run"),
    "simulate": ("commopt.simulate.scaling.Scaling", "weak"),
    "bandwidth": ("commopt.bandwidth.cli", "measure"),
    "chaos": ("commopt.cluster.network.EmulatedNetwork", "build"),
    "cluster": ("commopt.cluster.network.EmulatedNetwork", "build"),
}
OPTIONS_OF = (
    *("evidence.bucketing", "compressors.__main__", "evidence.convergence.ranks", "evidence.overlap"),
    *("evidence.prediction.__main__", "evidence.scaling.worker", "training.strategies", "evidence.tuning.__main__"),
)
REPORTS = ("evidence.prediction.report", "evidence.scaling.report", "training.report", "evidence.tuning.report")
BEGUN = (
    *("evidence.compression_error", "gpu.__main__", "gpu.build", "gpu.machine", "gpu.report", "evidence.hook_overhead"),
    *("kernels.__main__", "evidence.recording_cost", "evidence.scaling.predicted"),
)
COMMANDS = (
    Command("topology", lambda arguments: topology.__main__.main(arguments)),
    Command("commopt", lambda arguments: commopt.__main__.main(arguments), (WORK["run"],)),
    *(Command(f"commopt {name}", of_commopt(name), (WORK[name],)) for name in commopt.__main__.COMMANDS),
    Command("bench.document", of_module("bench.document"), (("bench.document", "filled"),)),
    Command("bench.evidence.check", of_module("bench.evidence.check"), (("bench.evidence.check", "report"),)),
    Command("bench.plot", of_module("bench.plot.__main__"), (("bench.plot.__main__", "draw_all"),)),
    *(Command(f"bench.{name}", of_module(f"bench.{name}")) for name in REPORTS),
    *(Command(f"bench.{name}", of_module(f"bench.{name}", "parse_options")) for name in OPTIONS_OF),
    *(Command(f"bench.{name}", of_module(f"bench.{name}"), PARSED) for name in BEGUN),
)


# ------------------------------------------------------------------------------------------ cases


def mutated(document: Any, chance: random.Random) -> Any:
    """Replace or drop one value somewhere in a JSON document."""
    places = list(_places(document))
    if not places:
        return chance.choice(BAD)
    holder, key = chance.choice(places)
    if chance.random() < 0.25:
        del holder[key]
    else:
        holder[key] = chance.choice(BAD)
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def documents() -> dict[str, str]:
    """Return one good file of every kind that a command reads."""
    plan = Plan((("a", "b"), ("c",)), "flat")
    tried = Outcome("flat", "flat", 0.0, 10.0, 10.0)
    workload = {
        "format": 1,
        "name": "small",
        "samples": 4,
        "parameters": [
            {"name": "a.weight", "shape": [64, 64], "ready_us": 90},
            {"name": "a.bias", "shape": [64], "ready_us": 40},
        ],
    }
    return {
        "plan.json": plan.to_json(),
        "tuned.json": Tuned("flat", ("lossless",), (2, 2), 10, (tried,), plan, "fastest").to_json(),
        "workload.json": json.dumps(workload),
        "machine.xml": rail_machine(4),
        "matrix.txt": matrix(4, all_pairs("NV4")),
    }


def hostile_files(folder: Path) -> list[Path]:
    """Make files that are none of what commands read, and places that are no files."""
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").write_text("")
    (folder / "nested.json").write_text("[" * 100_000)
    (folder / "closed.json").write_text('{"a":' * 2_000 + "1" + "}" * 2_000)
    (folder / "huge_number.json").write_text('{"format": 1' + "0" * 5_000 + "}")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "nan.json").write_text('{"format": NaN}')
    (folder / "latin.log").write_bytes("NCCL WARN r\xe9seau\n".encode("latin-1"))
    (folder / "log").write_text("host:1:2 [0] NCCL INFO Channel 00/9 : 0 1\nhost:1:2 [0] NCCL WARN x\n" * 3)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir(exist_ok=True)
    return [
        *folder.iterdir(),
        folder / "absent" / "file.json",
        folder / ("long" * 90),
        Path("/dev/full"),
        Path("/dev/null"),
    ]


@dataclass
class Cases:
    """Draws arguments for a command from its own options."""

    folder: Path
    files: Sequence[Path]
    good: dict[str, str]
    root: Path

    def draw(self, parser: Any, chance: random.Random) -> list[str]:
        """Return arguments: some of the parser's options, each with a value that may be good, and loose words."""
        arguments: list[str] = []
        actions = list(parser._actions)
        for action in chance.sample(actions, min(len(actions), chance.randrange(4))):
            if action.option_strings:
                arguments.append(chance.choice(action.option_strings))
                if action.nargs != 0 and chance.random() < 0.95:
                    arguments.append(self.value(action, chance))
            elif chance.random() < 0.7:
                arguments.append(self.value(action, chance))
        for action in actions:
            if getattr(action, "required", False) and action.option_strings and chance.random() < 0.8:
                arguments += [action.option_strings[0], self.value(action, chance)]
        if chance.random() < 0.3:
            arguments.insert(chance.randrange(len(arguments) + 1), self.value(None, chance))
        return arguments

    def value(self, action: Any, chance: random.Random) -> str:
        """Return what may stand behind an option."""
        if getattr(action, "choices", None) and not isinstance(action.choices, dict) and chance.random() < 0.5:
            return str(chance.choice(list(action.choices)))
        kind = chance.randrange(5)
        if kind == 0:
            return chance.choice(NUMBERS)
        if kind == 1:
            return str(self.damaged(chance))
        if kind == 2:
            return str(chance.choice([*self.files, self.root]))
        return chance.choice(TEXTS)

    def damaged(self, chance: random.Random) -> Path:
        """Write a good file with one fault, or none."""
        name, text = chance.choice(list(self.good.items()))
        path = self.folder / f"{chance.randrange(8)}_{name}"
        if name.endswith(".json"):
            content = json.loads(text)
            text = json.dumps(content if chance.random() < 0.2 else mutated(content, chance))
        elif chance.random() < 0.8:
            begin = chance.randrange(len(text))
            text = (
                text[:begin]
                + chance.choice(["", '"', "<", "\t", "9" * 400, "\x00"])
                + text[begin + chance.randrange(9) :]
            )
        path.write_text(text)
        return path


@contextmanager
def only_parsed(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Take the work out of a command; yields the parsers that it used, the last one used last."""
    used: list[Any] = []
    original = CommandParser.parse_known_args  # by which parse_args goes

    def parse_known_args(self: Any, *given: Any, **named: Any) -> tuple[Namespace, list[str]]:
        used.append(self)
        parsed: tuple[Namespace, list[str]] = original(self, *given, **named)
        if command.work == PARSED and not parsed[1]:
            raise StartedError
        return parsed

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handler: None)  # the cluster's would stay
        patch.setattr(CommandParser, "parse_known_args", parse_known_args)
        for path, name in () if command.work == PARSED else command.work:
            patch.setattr(f"{path}.{name}", started)
        patch.setattr(sys, "argv", list(sys.argv))
        yield used


def outcome_of(command: Command, arguments: list[str]) -> object:
    """Return the exit status, or "started"."""
    try:
        status = command.main(arguments)
    except StartedError:
        return "started"
    except SystemExit as leave:
        return 0 if leave.code is None else leave.code
    return status if isinstance(status, int) else "started"


def subparser(command: Command, parser: Any) -> Any:
    """Return the parser of `commopt NAME`, whose options are drawn."""
    name = command.name.partition(" ")[2]
    if not name:
        return parser
    (choices,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return choices[name]


@pytest.fixture
def cases(tmp_path: Path) -> Cases:
    good = documents()
    links = tmp_path / "links.json"
    nominal_links(TeamShape.of((2, 2)), Speeds(1.0, 10.0)).save(links)
    good["links.json"] = links.read_text()
    (tmp_path / "files").mkdir()
    files = hostile_files(tmp_path / "files")
    return Cases(tmp_path, files, good, tcp_server(tmp_path / "machine").root)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("batch", range(PER_COMMAND // BATCH))
def test_no_input_ends_in_a_traceback(
    command: Command,
    batch: int,
    cases: Cases,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("commopt.doctor.cli.WATCH_S", 0.0)
    monkeypatch.setattr("commopt.simulate.cli.MOST_GPUS", 64)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with only_parsed(command, monkeypatch) as used:
        outcome_of(command, ["--no-such-option"])
        parser = topology.__main__._parser() if command.name == "topology" else subparser(command, used[0])
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    refused = 0
    for case in range(batch * BATCH, (batch + 1) * BATCH):
        chance = random.Random(f"{command.name} {case}")
        arguments = cases.draw(parser, chance)
        environment = chance.choice(ENVIRONMENTS) if "bandwidth" in command.name or "probe" in command.name else {}
        with only_parsed(command, monkeypatch), monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                outcome = outcome_of(command, list(arguments))
            except Exception as error:
                raise AssertionError(f"case {case}: {command.name} {str(arguments)[:400]} in {environment}") from error
        told = capsys.readouterr().err
        what = f"case {case}: {command.name} {str(arguments)[:400]} in {environment}: {outcome}, {told[:400]!r}"
        assert outcome == "started" or outcome in (0, 1, 2, 3), what
        if outcome == BAD_INPUT:
            refused += 1
            assert told.count("\n") == 1, what
            assert len(told) < 1000, what
    assert refused  # else nothing was tried


# ---------------------------------------------------------------------------------------- its parts


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (
            parse_nbytes,
            {"8": 8, "4K": 4096, "32m": 2**25, "1.5K": 1536, " 7 ": 7},
            ["1e9", "-4K", "1.5.5K", "99999G", ""],
        ),
        (whole(2, 5), {"2": 2, "5": 5}, ["1", "6", "1_0", "5.0", "", "9" * 400, "\u0663"]),
        (number(0, 1), {"1": 1, "1e-3": 1e-3}, ["0", "1.1", "nan", "x"]),
        (number(least=0), {"0": 0, "7": 7}, ["-1", "inf"]),
    ],
)
def test_numbers_within_bounds(parse: Callable[[str], float], good: dict[str, float], bad: list[str]) -> None:
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(ArgumentTypeError, match="is not a"):
            parse(text)


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (known,) = (each for each in COMMANDS if each.name == "bench.kernels.__main__")
    os.mkfifo(tmp_path / "pipe")
    for path, says in ((tmp_path / "no" / "x.json", "No such file"), (tmp_path / "pipe", "not a plain file")):
        with only_parsed(known, monkeypatch):
            assert outcome_of(known, ["--json", str(path)]) == BAD_INPUT
        assert says in capsys.readouterr().err
    with only_parsed(known, monkeypatch):
        assert outcome_of(known, ["--json", str(tmp_path / "new.json")]) == "started"
    assert not (tmp_path / "new.json").exists()


def test_asking_whether_a_file_can_be_written_leaves_links_and_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    require_writable(link)  # whose file comes later
    assert link.is_symlink()
    assert not file.exists()
    link.write_text("mine")
    require_writable(link)
    assert (link.is_symlink(), file.read_text()) == (True, "mine")
    ring = tmp_path / "ring"
    ring.symlink_to(ring)
    with pytest.raises(ConfigurationError, match="ring cannot be written"):
        require_writable(ring)

    file.unlink()
    opens = Path.open

    def outrun(path: Path, *mode: Any) -> Any:
        with opens(file, "w") as other:
            other.write("another's")
        return opens(path, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", outrun)
        require_writable(file)
    assert file.read_text() == "another's"
