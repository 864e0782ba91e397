# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/*.md show: Python runs, commands are understood, figures are what their commands write."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from bench.document import filled, main
from commopt.cost import Speeds, nominal_links
from commopt.groups import TeamShape
from commopt.schedule import sync
from tests.ranks import run

# Modules run here as commands; others have imported some of them before.
pytestmark = pytest.mark.filterwarnings("ignore:.* found in sys.modules after import of package:RuntimeWarning")

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCED = re.compile(r"(?:^<!-- not run: (?P<reason>.+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
_INLINE = re.compile(r"`((?:torchrun [^`]*|python )-m (?:commopt|topology|bench)[^`]*)`")


def blocks(language: str) -> dict[str, str]:
    """Return the blocks of a language that are not marked otherwise, by file and line."""
    found = {}
    for document in DOCUMENTS:
        text = document.read_text()
        for match in _FENCED.finditer(text):
            if match["language"] == language and not match["reason"]:
                found[f"{document.relative_to(ROOT)}:{text[: match.start('text')].count(chr(10))}"] = match["text"]
    return found


# --------------------------------------------------------------------- Python


class Model(nn.Module):
    """Two layers, called as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lm_head(torch.tanh(self.body(x)))
        return y


class Context(dict[str, Any]):
    """What a snippet may take for granted, made when it is asked for; the line `...  # train` trains."""

    def __init__(self, folder: str) -> None:
        super().__init__(torch=torch, commopt=commopt, folder=folder, rank=dist.get_rank())
        self.update(device="cpu", nodes=2, ranks_per_node=1)

    def __missing__(self, name: str) -> Any:
        made: dict[str, Callable[[], Any]] = {
            "model": Model,
            "ddp": lambda: TorchDDP(self["model"]),
            "comm": self._attached,
            "scaler": lambda: torch.amp.GradScaler("cpu"),
            "optimizer": lambda: torch.optim.SGD(self["model"].parameters(), lr=0.01),
            "loss_fn": lambda: nn.functional.mse_loss,
            "micro_batches": lambda: [(torch.ones(2, 64), torch.ones(2, 64))] * 3,
            "x": lambda: torch.ones(64),
            "y": lambda: torch.empty(64),
            "gathered": lambda: torch.empty(64 * dist.get_world_size()),
            "part": lambda: torch.empty(64 // dist.get_world_size()),
            "train": lambda: self._train,
            "files": self._saved,
        }
        if name not in made:
            raise KeyError(name)
        self[name] = made[name]()
        return self[name]

    def _attached(self) -> commopt.HookState:
        state: commopt.HookState = commopt.attach(self["ddp"], commopt.hierarchical_quantized)
        self._train(state)
        return state

    def _saved(self) -> list[Path]:
        torch.save({"comm": self["comm"].state_dict()}, f"checkpoint-{self['rank']}.pt")
        dist.barrier()
        return sorted(Path().glob("checkpoint-*.pt"))

    def _train(self, state: commopt.HookState | None = None) -> None:
        """Take 16 steps, or as many as tuning needs; where nothing is attached, none."""
        state = state or self.get("comm") or self.get("state")
        if state is None:
            return
        for _ in range(1000 if isinstance(state.aggregator, commopt.Auto) else 16):
            if state.tuned is not None:  # alike on all ranks
                break
            self["optimizer"].zero_grad()
            self["ddp"](torch.ones(2, 64)).square().mean().backward()
            self["optimizer"].step()


def execute(rank: int, world_size: int, text: str, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("COMMOPT_PLAN")
        patch.setattr(sync, "_BUDGET_OF_EACH_S", 0.05)
        program = re.sub(r"^\.\.\.  # train$", "train()", text, flags=re.M)
        exec(compile(program, "<snippet>", "exec"), {"torch": torch}, Context(folder))


@pytest.mark.parametrize("text", [pytest.param(text, id=place) for place, text in blocks("python").items()])
def test_python_runs(text: str, tmp_path: Path) -> None:
    nominal_links(TeamShape.of((8, 8, 8, 8)), Speeds(nic_gbps=25, intra_gb_per_s=200)).save(tmp_path / "links.json")
    run(execute, 2, text, str(tmp_path), nodes=(1, 1))


def test_few_blocks_are_not_run() -> None:
    reasons = [match["reason"] for each in DOCUMENTS for match in _FENCED.finditer(each.read_text()) if match["reason"]]
    elsewhere = [re.fullmatch(r"(tests/\w+\.py) runs it", reason) for reason in reasons]
    assert elsewhere.count(None) <= 2, reasons
    assert all((ROOT / test[1]).exists() for test in elsewhere if test)


# --------------------------------------------------------------------- commands


class Understood(BaseException):
    """A parser has taken all arguments; what it would do then is not done."""


def commands() -> dict[str, list[str]]:
    """Return the modules with their arguments of all commands that run one of this project's, by their text."""
    texts = [line for text in (*blocks("bash").values(), *blocks("").values()) for line in _lines(text)]
    inline = [match[1] for each in DOCUMENTS for match in _INLINE.finditer(each.read_text())]
    texts += [" ".join(text.split()) for text in inline if not re.search(r"-m \S+$|\.\.\.|\[", text)]  # whole ones
    found = {}
    for text in texts:
        words = shlex.split(text, comments=True)
        places = [place for place, word in enumerate(words[:-1]) if word == "-m" and _is_ours(words[place + 1])]
        if words[0] == "commopt":  # the console script
            found[text] = words
        for place in places:  # one may run another
            found[" ".join(words[place:])] = words[place + 1 :]
    return found


def _lines(text: str) -> list[str]:
    return [
        line
        for line in text.replace("\\\n", " ").splitlines()
        if re.match(r"(\S+=\S+ )*((torchrun|python) .*-m |commopt )", line)
    ]


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("commopt", "topology", "bench")


@pytest.mark.parametrize("words", [pytest.param(words, id=text[:60]) for text, words in commands().items()])
def test_commands_are_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module, *arguments = words
    whole, known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def parse_args(self: argparse.ArgumentParser, *args: Any) -> None:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", known)  # parse_args goes by it
        whole(self, *args)
        raise Understood

    def parse_known_args(self: argparse.ArgumentParser, *args: Any) -> None:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", known)  # that of subcommands
        known(self, *args)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Understood):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


def test_make_knows_its_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = {name for each in DOCUMENTS for name in re.findall(r"(?:^|`)make ([\w-]+)", each.read_text(), re.M)}
    assert asked
    assert asked <= targets


def test_every_variable_is_on_the_page() -> None:
    sources = [path.read_text() for folder in ("commopt", "topology") for path in (ROOT / folder).rglob("*.py")]
    known = {name for text in sources for name in re.findall(r"\bCOMMOPT_[A-Z_]+\b", text)} - {"COMMOPT_REQUIRE_CUDA"}
    told = re.findall(r"^\| `(COMMOPT_\w+)` \|", (ROOT / "docs" / "usage.md").read_text(), re.M)
    assert known
    assert sorted(told) == sorted(known)


# --------------------------------------------------------------------- figures


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if "<!-- begin: " in each.read_text()], ids=str)
def test_tables_are_what_their_commands_print(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = document.read_text()
    assert filled(text) == text, "python -m bench.document"
    places = re.findall(r"^<!-- begin: .*-->\n(.*)\n", text, re.M)
    assert len(places) == text.count("<!-- begin: ") == text.count("<!-- end -->")
    assert all(places)


def test_a_table_that_is_out_of_date_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    changed = re.sub(r"\| `ddp` \| \d+ \|", "| `ddp` | 0 |", text)
    assert changed != text
    document = tmp_path / "README.md"
    document.write_text(changed)
    for arguments, status in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr(sys, "argv", ["bench.document", *arguments, str(document)])
        assert main() == status
    assert document.read_text() == text


def test_nobody_is_sent_to_a_package_that_is_on_no_index() -> None:
    """`commopt[plot]` would be somebody else's project if there was one."""
    sources = [
        path
        for folder in ("commopt", "topology", "bench", "csrc", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in (*sources, *DOCUMENTS):
        assert not re.search(r"commopt\[(?!\.)\w+\]|pip install commopt", path.read_text()), path
