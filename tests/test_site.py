# SPDX-License-Identifier: Apache-2.0
"""The documentation as readers meet it: commands that they paste, messages that they look up, names, links."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import commopt
from commopt.cluster import EmulatedCluster
from examples import reference
from tests.ranks import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def site_hooks() -> dict[str, Any]:
    """Return what docs/site_hooks.py defines."""
    pytest.importorskip("griffe", reason="the documentation's packages are not installed: pip install '.[docs]'")
    return runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))


# --------------------------------------------------------------------- quickstart

QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
# What stands on the page and is not run: the tests have an environment, with commopt in it.
MADE_ALREADY = {"python3 -m venv .venv", ". .venv/bin/activate", "pip install ./commopt"}


def pasted(heading: str) -> list[str]:
    """Return the commands below a heading of the page, each with the lines that belong to it."""
    _, _, section = QUICKSTART.partition(f"\n## {heading}\n")
    blocks = re.findall(r"^```bash\n(.*?)^```$", section.partition("\n## ")[0], re.M | re.S)
    return re.findall(r"^(?:.*<<'EOF'\n(?:.*\n)*?EOF|(?:.*\\\n)*.*\S)$", "".join(blocks), re.M)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return one with the commands that an installation would have put on PATH."""
    for name, module in (("commopt", "commopt"), ("torchrun", "torch.distributed.run")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        command.chmod(0o755)
    found = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **found, **variables}


@pytest.fixture
def _needs_cluster() -> None:
    if missing := EmulatedCluster.missing():
        pytest.skip(missing)


@pytest.mark.cluster
@pytest.mark.timeout(900)  # its three programs take their turn among the other tests' clusters
@pytest.mark.usefixtures("_needs_cluster")
def test_from_a_clone_to_a_script_on_two_nodes(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone, so there is nothing to clone from")
    commands = pasted("Two emulated nodes on one machine")
    assert len(commands) <= 10
    assert set(commands) >= MADE_ALREADY
    # The verdict is on the machine as it is: on a busy one a rank may well be late, and the status 1 says so.
    may_be_slow = [f"{one} || [ $? = 1 ]" if "doctor --measure" in one else one for one in commands]
    script = "\n".join(["set -e", *(command for command in may_be_slow if command not in MADE_ALREADY)])
    (tmp_path / "bin").mkdir()
    home = {"COMMOPT": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}  # the host name of a test machine may lead nowhere
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment(tmp_path / "bin", **home),
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^loss [\d.]+, \d+ ms per step$", done.stdout, re.M)) == 4
    assert re.search(r"^(As it should be: 2 nodes of 2, 4 ranks|Slower than it should be: rank \d)", done.stdout, re.M)
    assert re.search(r"^between nodes, all_reduce .*as it should be$", done.stdout, re.M), done.stdout
    assert "Cast(dtype=torch.bfloat16)" in done.stdout  # the report, where a long name goes on below


@pytest.mark.cluster
@pytest.mark.usefixtures("_needs_cluster")
def test_two_machines_that_meet_by_name(tmp_path: Path) -> None:
    """As on the page but for the ranks of each machine: emulated ones are called node0 and node1 too, on eth0."""
    (train,) = (command for command in pasted("Two emulated nodes on one machine") if "train.py <<" in command)
    commands = [command.replace("--nproc-per-node 8", "--nproc-per-node 1") for command in pasted("Two machines")]
    script = "\n".join(["set -e", train, *commands])
    (tmp_path / "bin").mkdir()
    variables = environment(tmp_path / "bin")
    with EmulatedCluster(nodes=2, ranks_per_node=1, rate="none") as cluster:
        machines = []
        for node in range(2):
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            named = ["unshare", "--uts", "bash", "-c", f"hostname node{node}\n{script}"]
            enter = cluster._network.enter(node, named)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            machines.append(subprocess.Popen(enter, cwd=folder, env=variables, **pipes))  # type: ignore[call-overload]
        said = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "ms per step" in said[0]
    assert "ms per step" not in said[1]


# --------------------------------------------------------------------- names and messages


def test_every_public_name_has_an_example() -> None:
    assert set(commopt.__all__) - reference.examples().keys() == set()


def run_examples(rank: int, world_size: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, example in reference.examples().items():
            try:
                reference.run(example)
            except Exception as error:
                raise AssertionError(f"the example of {name}: {error}") from error


def test_examples_run(tmp_path: Path) -> None:
    run(run_examples, 1, str(tmp_path))


def test_quoted_messages_are_those_of_the_source() -> None:
    text = site_hooks()["text_of"]
    trees = [ast.parse(path.read_text()) for path in (ROOT / "commopt").rglob("*.py")]
    strings = (ast.Constant, ast.JoinedStr)
    texts = {text(node) for tree in trees for node in ast.walk(tree) if isinstance(node, strings)}
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("\n## ")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|.*\|.*\|$", page, re.M)
    assert len(quoted) > 25
    assert [each for each in quoted if not any(each.strip("…") in found for found in texts)] == []


def test_all_messages_are_listed() -> None:
    listed = site_hooks()["messages"]()
    assert ("ConfigurationError", "op … is unknown; use 'avg' or 'sum'") in listed["commopt.collectives"]
    assert ("warning", "this rank was given another plan than rank …, whose plan all follow") in listed[
        "commopt.schedule"
    ]


# --------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """Return those of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" in link:
                continue
            outside = page.is_relative_to(ROOT / "docs") and not target.is_relative_to(ROOT / "docs")
            if outside or not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)} leads to {link}")
    assert wrong == []


def test_a_wrong_link_of_the_site_ends_its_build(tmp_path: Path) -> None:
    check = site_hooks()["on_post_build"]
    (tmp_path / "other.html").write_text('<h1 id="there">')
    pages: Mapping[str, str | None] = {
        '<a href="other.html#there">': None,
        '<a href="other.html#here">': "index.html leads to other.html#here",
        '<a href="another.html">': "index.html leads to another.html",
        '<a href="../">': "index.html leads to ../",
        '<script src="https://example.org/x.js">': "index.html loads https://example.org/x.js",
    }
    for text, complaint in pages.items():
        (tmp_path / "index.html").write_text(text)
        if complaint is None:
            check({"site_dir": str(tmp_path)})
        else:
            with pytest.raises(SystemExit, match=re.escape(complaint)):
                check({"site_dir": str(tmp_path)})
