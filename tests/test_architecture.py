"""The structure docs/design.md promises: imports go down only, and topology knows nobody."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the top down; a package may import the ones after it (and itself), never the ones before.
LAYERS = (
    "commopt.__main__",
    "commopt.doctor.cli",
    "commopt.doctor.compare",
    "commopt.doctor.log_findings",
    "commopt.doctor.log_reader",
    "commopt.doctor.log_causes",
    "commopt.doctor.gpudirect",
    "commopt.doctor.rdma",
    "commopt.doctor.gpus",
    "commopt.doctor.ethernet",
    "commopt.doctor.host",
    "commopt.doctor.settings",
    "commopt.doctor.network",
    "commopt.doctor.machine",
    "commopt.doctor.nvml",
    "commopt.doctor.finding",
    "commopt.bandwidth",
    "commopt.simulate",
    "commopt.probe",
    "commopt.run",
    "commopt.hooks",
    "commopt.collectives",
    "commopt.bucketing",
    "commopt.timeline",
    "commopt.tuning",
    "commopt.plan",
    "commopt.cost",
    "commopt.aggregate",
    "commopt.feedback",
    "commopt.compress",
    "commopt.kernels",
    "commopt.lanes",
    "commopt.groups",
    "commopt.recording",
    "commopt.concise_repr",
    "commopt.cluster",
    "commopt.command_line",
    "commopt.document",
    "commopt.errors",
    "commopt.version",
    "topology.__main__",
    "topology.fabric",
    "topology.files",
    "topology.show",
    "topology.live",
    "topology.nvidia_smi",
    "topology.nccl_xml",
    "topology.facts",
    "topology.cluster",
    "topology.host",
    "topology.model",
    "topology.kernel_files",
    "topology.busid",
    "topology.pci_class",
    "topology.errors",
)
FRONT_DOORS = ["commopt", "commopt.doctor", "topology"]


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
    door = name.split(".")[0]
    return [target for target in imports if target == door or ((layer := layer_of(target)) is not None and layer < own)]


@pytest.mark.parametrize(("name", "file"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_down_only(name: str, file: Path) -> None:
    assert violations(name, imports_of(file)) == []


def test_every_module_has_a_layer() -> None:
    assert [name for name, _ in modules() if layer_of(name) is None] == FRONT_DOORS


def test_an_upward_import_would_be_noticed() -> None:
    assert violations("commopt.groups.team", {"commopt.lanes.base"}) == ["commopt.lanes.base"]
    assert violations("commopt.errors", {"commopt.__main__"}) == ["commopt.__main__"]
    assert violations("commopt.errors", {"commopt"}) == ["commopt"]
    assert violations("topology.host", {"commopt.errors"}) == ["commopt.errors"]


def test_topology_needs_the_standard_library_only() -> None:
    for name, file in modules():
        if name.startswith("topology"):
            assert {module.split(".")[0] for module in imports_of(file)}.isdisjoint({"torch", "numpy", "commopt"})


def test_no_file_outgrows_one_idea() -> None:
    sizes = {name: len(file.read_text().splitlines()) for name, file in modules()}
    assert {name: lines for name, lines in sizes.items() if lines > 400} == {}
