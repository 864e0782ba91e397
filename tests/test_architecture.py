"""The structure docs/design.md promises: imports go down only, and topology knows nobody."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the top down; a package may import the ones after it (and itself), never the ones before.
LAYERS = (
    "commopt.hooks",
    "commopt.collectives",
    "commopt.aggregate",
    "commopt.feedback",
    "commopt.compress",
    "commopt.kernels",
    "commopt.lanes",
    "commopt.groups",
    "commopt.brief",
    "commopt.errors",
    "commopt.version",
    "topology",
)


def layer_of(module: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if module == layer or module.startswith(layer + ".")), None)


def modules() -> list[tuple[str, Path]]:
    files = [*ROOT.glob("commopt/**/*.py"), *ROOT.glob("topology/**/*.py")]
    names = [(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), file) for file in files]
    return sorted(names)


def imports_of(file: Path) -> set[str]:
    """Every module a file imports; `from package import name` counts as package.name where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
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
    """Imports of `name` that go up, or that go through the package's front door from inside it."""
    own = layer_of(name)
    if own is None:
        return []
    return [target for target in imports if target == "commopt" or (layer_of(target) or len(LAYERS)) < own]


@pytest.mark.parametrize(("name", "file"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_down_only(name: str, file: Path) -> None:
    assert violations(name, imports_of(file)) == []


def test_every_module_has_a_layer() -> None:
    assert [name for name, _ in modules() if layer_of(name) is None] == ["commopt"]


def test_an_upward_import_would_be_noticed() -> None:
    assert violations("commopt.groups.team", {"commopt.lanes.base"}) == ["commopt.lanes.base"]
    assert violations("topology.host", {"commopt.errors"}) == ["commopt.errors"]


def test_topology_needs_the_standard_library_only() -> None:
    for name, file in modules():
        if name.startswith("topology"):
            assert {module.split(".")[0] for module in imports_of(file)}.isdisjoint({"torch", "numpy", "commopt"})


def test_no_file_outgrows_one_idea() -> None:
    sizes = {name: len(file.read_text().splitlines()) for name, file in modules()}
    assert {name: lines for name, lines in sizes.items() if lines > 400} == {}
