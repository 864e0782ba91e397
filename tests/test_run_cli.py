# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt run` from the shell: exit status, report, and what it says when there was nothing to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import commopt
from bench.demo import local_ranks
from commopt.__main__ import main
from commopt.run.cli import NOTHING
from tests.speed import limit

ROOT = Path(__file__).parent.parent

TRAINING = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        ddp(torch.full((2, 8), dist.get_rank() + 1.0)).sum().backward()
        optimizer.step()
    sys.stderr.write(f"weight {ddp.module.weight.sum().item():.6f}\\n")
    dist.destroy_process_group()
    sys.exit()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    return path


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", *local_ranks(1, 2)[0]]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return subprocess.run(
        [*launcher, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COMMOPT_RANKS_PER_NODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_script_trains_with_the_hook(script: Path) -> None:
    done = torchrun("-m", "commopt", "run", "--strategy", "hierarchical_bf16", "--report", str(script), "3")
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weight (\S+)", done.stderr)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    lines = done.stdout.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("Linear")]
    model, *hook, steps, intra, inter = lines[place].split()
    hook += [
        word for line in lines[place + 1 : lines.index("", place)] for word in line.split()
    ]  # a long name goes on below
    assert (model, "".join(hook)) == ("Linear", repr(commopt.build_preset("hierarchical_bf16")).replace(" ", ""))
    # both of two ranks send all of 32 gradients in 16 bits
    assert (steps, intra, float(inter)) == ("3", "0", 32 * 2 / 1e6)


LATE = TRAINING.replace("    for step in", "    import time\n    for step in").replace(
    "        optimizer.zero_grad()\n",
    """        if step == 8 and sys.argv[2] == "raise" and dist.get_rank() == 1:
            raise ValueError("broken")
        time.sleep(0.2 * dist.get_rank())
        optimizer.zero_grad()
""",
)


def test_a_training_ends_in_a_verdict_that_names_the_late_rank(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(LATE)
    done = torchrun("-m", "commopt", "run", "--strategy", "hierarchical", "--report", str(path), "10", "end")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (begin,) = [place for place, line in enumerate(lines) if "of a step of" in line]
    text = " ".join(lines[begin:])
    late = re.search(r"all wait for rank 1 on \S+, +which is (\d+) ms late", text)
    assert late, text
    assert 100 < int(late.group(1)) < limit(400)  # it sleeps 200; a busy machine delays each rank
    assert re.search(r"between nodes +float32 0\.128 kB", text), text  # 32 elements
    assert "a step of Linear with hierarchical, " in text
    assert len(lines) - begin <= 25
    assert max(map(len, lines[begin:])) <= 80
    assert "no verdict" not in done.stderr


def test_a_training_that_fails_waits_for_no_verdict(tmp_path: Path) -> None:
    """Rank 1 raises and would destroy the process group: nobody waits for it, nothing is made of half a training."""
    path = tmp_path / "late.py"
    destroyed = "    dist.destroy_process_group()\n    sys.exit()\n"
    text = LATE.replace(destroyed, "").replace(
        "\n    main()", "\n    try:\n        main()\n    finally:\n" + "        dist.destroy_process_group()"
    )
    path.write_text(text)
    done = torchrun("-m", "commopt", "run", "--strategy", "hierarchical", "--report", str(path), "10", "raise")
    assert done.returncode != 0
    assert "ValueError: broken" in done.stderr
    assert "of a step of" not in done.stdout
    assert "did not reach" not in done.stderr


def test_bad_input_reaches_the_launcher(script: Path) -> None:
    refused = torchrun("-m", "commopt", "run", "--strategy", "hierarchy", str(script), "1")
    said = [line for line in refused.stderr.splitlines() if line.startswith("commopt run: ")]
    said = [line for line in said if not line.startswith("commopt run: ranks from torchrun: 2")]  # before it is read
    assert len(set(said)) == 1  # from one rank or both: torchrun ends the others with the first
    assert "preset 'hierarchy' is unknown" in said[0]
    assert re.search(r"exitcode\s*:\s*2\b", refused.stderr)
    assert "weight" not in refused.stderr


def run_here(tmp_path: Path, text: str, *options: str) -> int:
    script = tmp_path / "here.py"
    script.write_text(text)
    return main(["run", "--strategy", "flat", *options, str(script)])


@pytest.mark.parametrize(("text", "status"), [("", None), ("raise SystemExit(5)", 5), ("raise SystemExit('no')", "no")])
def test_a_script_without_a_model_is_told_of(
    text: str, status: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if text:
        with pytest.raises(SystemExit) as exited:
            run_here(tmp_path, text, "--report")
        assert exited.value.code == status
    else:
        assert run_here(tmp_path, text, "--report") == 0
    said = capsys.readouterr()
    assert said.err == NOTHING + "\n"
    assert said.out == ""


def test_one_rank_says_it_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_here(tmp_path, "") == 0
    assert capsys.readouterr().err == ""


APART = TRAINING.replace(
    "    dist.destroy_process_group()\n    sys.exit()",
    """    if sys.argv[2] == "destroy":
        dist.destroy_process_group()
    else:
        import atexit
    show = lambda: sys.stderr.write(f"at the end {ddp.module.weight.sum().item():.6f}\\n")
    show() if sys.argv[2] == "destroy" else atexit.register(show)""",
)


@pytest.mark.parametrize("how", ["destroy", "exit"])
def test_nodes_that_learn_by_themselves_end_with_one_model(tmp_path: Path, how: str) -> None:
    path = tmp_path / "apart.py"
    path.write_text(APART)
    done = torchrun("-m", "commopt", "run", "--strategy", "onebit_local", str(path), "3", how)
    assert done.returncode == 0, done.stderr
    before, after = (set(re.findall(rf"{name} (\S+)", done.stderr)) for name in ("weight", "at the end"))
    assert len(before) == 2
    assert len(after) == 1
    assert "what it evaluates or saves before is one node's model" in done.stderr
