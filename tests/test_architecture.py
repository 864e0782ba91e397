# SPDX-License-Identifier: Apache-2.0
"""The structure docs/design.md promises: imports go down only."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From the top down; a package may import the ones after it (and itself), never the ones before.
LAYERS = (
    "commopt.__main__",
    "commopt.chaos",
    "commopt.run.cli",
    "commopt.doctor",
    "commopt.bandwidth",
    "commopt.simulate",
    "commopt.probe",
    "commopt.server_commands",
    "commopt.run",
    "commopt.integrations",
    "commopt.hooks",
    "commopt.sharded",
    "commopt.server",
    "commopt.patches",
    "commopt.attached",
    "commopt.collectives",
    "commopt.schedule",
    "commopt.timeline",
    "commopt.cost",
    "commopt.aggregate",
    "commopt.feedback",
    "commopt.compress",
    "commopt.kernels",
    "commopt.lanes",
    "commopt.groups",
    "commopt.recording",
    "commopt.concise_repr",
    "commopt.pages",
    "commopt.cluster",
    "commopt.display",
    "commopt.command_line",
    "commopt.launcher",
    "commopt.checkpoint_files",
    "commopt.document",
    "commopt.cuda_streams",
    "commopt.errors",
    "commopt.version",
    "topology",
)
FRONT_DOORS = {"commopt", "topology"}  # for users; inside, each module is imported by its own name
COMMANDS = {
    f"commopt.{name}"
    for name in ("chaos", "doctor", "probe", "simulate", "run", "bandwidth", "cluster", "server_commands")
}


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def modules() -> dict[str, Path]:
    """Return the files of commopt and topology by the names they are imported by."""
    files = python_files("commopt", "topology")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def layer_of(module: str) -> int | None:
    """Return the place of a module in LAYERS: of those that fit, the longest name counts."""
    fitting = [layer for layer in LAYERS if module == layer or module.startswith(layer + ".")]
    return LAYERS.index(max(fitting, key=len)) if fitting and module not in FRONT_DOORS else None


def imports_of(file: Path, *, when_loaded: bool = False) -> set[str]:
    """Return every module a file imports, or those that loading it imports.

    `from package import name` counts as package.name if that is a module.
    """
    found: set[str] = set()
    tree = tree_of(file)
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} uses a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (ROOT / full.replace(".", "/")).exists() or (ROOT / f"{full.replace('.', '/')}.py").exists()
                found.add(full if is_module else node.module)
    return found


def violations(name: str, imports: set[str]) -> list[str]:
    """Return the imports of `name` that go up, through a front door from inside, or to a command."""
    own = layer_of(name)
    if own is None:
        return []
    of_a_command = name == "commopt.__main__" or _command_of(name) is not None
    found = []
    for target in imports:
        layer = layer_of(target)
        through_the_door = target in FRONT_DOORS and target == name.split(".")[0]
        if through_the_door or (layer is not None and layer < own) or (_command_of(target) and not of_a_command):
            found.append(target)
    return found


def _command_of(module: str) -> str | None:
    return next((each for each in COMMANDS if module == each or module.startswith(each + ".")), None)


# --------------------------------------------------------------------- imports


def test_imports_go_down_only() -> None:
    found = {name: violations(name, imports_of(file)) for name, file in modules().items()}
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_modules_import_each_other_in_no_circle() -> None:
    imports = {name: imports_of(file, when_loaded=True) & modules().keys() for name, file in modules().items()}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_every_module_has_a_layer() -> None:
    assert {name for name in modules() if layer_of(name) is None} == FRONT_DOORS


def test_a_wrong_import_would_be_noticed() -> None:
    assert violations("commopt.groups.team", {"commopt.lanes.base"}) == ["commopt.lanes.base"]
    assert violations("commopt.errors", {"commopt.__main__"}) == ["commopt.__main__"]
    assert violations("commopt.errors", {"commopt"}) == ["commopt"]
    assert violations("topology.cluster", {"commopt.errors"}) == ["commopt.errors"]


def test_topology_needs_the_standard_library_only() -> None:
    for name, file in modules().items():
        if name.startswith("topology"):
            assert {module.split(".")[0] for module in imports_of(file)}.isdisjoint({"torch", "numpy", "commopt"})


# --------------------------------------------------------------------- names

# Callbacks of different frameworks, each of which is imported alone.
SHARED_NAMES = {"CommoptCallback"}
# To be renamed elsewhere; a name leaves this set when only one class has it.
STILL_TWICE: set[str] = set()


def test_the_page_explains_every_noun_of_the_plan() -> None:
    trees = [tree_of(file) for file in python_files("commopt/schedule")]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    page = (ROOT / "docs" / "design.md").read_text()
    ((count, table),) = re.findall(r"The plan in (\d+) nouns.*?\n\n(.*?)\n\n", page, re.DOTALL)
    nouns = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(nouns) == int(count)
    assert sorted(nouns) == sorted(name for name in classes if not name.startswith("_"))


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in python_files("commopt", "topology"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_NAMES}
    assert {name: found for name, found in twice.items() if name not in STILL_TWICE} == {}
