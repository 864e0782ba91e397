# SPDX-License-Identifier: Apache-2.0
"""Say which results are older than the code they measure: `python -m bench.evidence.check`, or `make evidence-check`.

For each file of bench/results: when and at which revision it was made, which pages show it, by which command it is made
again, and what has changed since in the code that it measures. The exit status is 0 however old results are: whether a
change can matter is for a person to say.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.environment import Revision, headers, kind_in
from commopt.command_line import CommandParser

_AVERAGING = (
    *("commopt/aggregate", "commopt/compress", "commopt/feedback", "commopt/groups", "commopt/kernels"),
    *("commopt/lanes", "commopt/attached", "commopt/hooks", "csrc"),
)
_STEP = (*_AVERAGING, "commopt/schedule", "commopt/sharded", "bench/models.py", "examples/train_gpt.py")
_CONVERGENCE = (*_STEP, "bench/evidence/convergence")
_SIMULATION = ("commopt/simulate", "commopt/cost", "commopt/aggregate", "commopt/compress", "bench/evidence/scaling")

MEASURES: Mapping[str, Sequence[str]] = {
    "accumulated_bias": ("commopt/compress", "commopt/kernels", "csrc/cpu", "bench/evidence/accumulated_bias.py"),
    "bandwidth": (*_AVERAGING, "commopt/bandwidth", "commopt/collectives"),
    "bucketing": (*_STEP, "bench/evidence/bucketing.py", "bench/evidence/training_run.py"),
    "chaos": (*_STEP, "commopt/chaos", "commopt/cluster", "bench/evidence/chaos.py"),
    "compat": ("commopt",),
    "compression_error": ("commopt/compress", "commopt/kernels", "bench/evidence/compression_error.py"),
    "compressors": (*_AVERAGING, "bench/compressors"),
    "engine": (
        *_AVERAGING,
        "bench/engine.py",
        "bench/slurm.py",
        "bench/ray.py",
        "examples/launch",
        "examples/train_ray.py",
    ),
    "exposed": (*_AVERAGING, "bench/gpu"),
    "connections": ("commopt/groups", "bench/evidence/connections.py"),
    "convergence": _CONVERGENCE,
    "exact_weights": (
        "commopt/kernels/differences.py",
        "commopt/sharded/exact.py",
        "commopt/sharded/all_gather.py",
        "csrc/cpu/differences.hpp",
        "bench/evidence/exact_weights.py",
    ),
    "gpu": ("commopt", "csrc", "bench/gpu", "tests"),
    "hook_overhead": (*_STEP, "bench/evidence/hook_overhead.py"),
    "kernels": ("commopt/kernels", "csrc", "bench/kernels"),
    "line_rate": ("commopt/groups", "bench/evidence/line_rate.py"),
    "machine": ("bench/gpu/machine.py",),
    "mutants": ("commopt", "topology", "csrc", "tests"),
    "overlap": (*_STEP, "bench/evidence/overlap.py"),
    "packing": ("commopt/kernels/packing.py", "commopt/aggregate/packed.py", "csrc/cpu", "bench/evidence/packing.py"),
    "parameter_server": ("commopt/server", *_AVERAGING, "bench/evidence/parameter_server.py"),
    "predicted_scaling": _SIMULATION,
    "prediction": (*_STEP, *_SIMULATION, "commopt/probe", "bench/evidence/prediction"),
    "preset_by_cluster": _SIMULATION,
    "probe": ("commopt/probe", "commopt/cost", "commopt/groups"),
    "recording_cost": (*_STEP, "commopt/recording", "bench/evidence/recording_cost.py"),
    "scale": ("commopt/groups", "commopt/lanes", "bench/evidence/scale"),
    "scaling": (*_STEP, "bench/evidence/scaling"),
    "shapes": (*_STEP, "bench/evidence/shapes.py"),
    "server_link": ("commopt/server", "bench/evidence/server_link.py"),
    "soak": (*_STEP, "commopt/server", "commopt/chaos/train.py", "bench/evidence/soak.py"),
    "training": (*_STEP, "bench/training"),
    "gain": (*_STEP, "commopt/doctor/verdict", "commopt/probe", "commopt/simulate", "bench/evidence/gain.py"),
    "verdict": ("commopt/doctor/verdict", "commopt/run", "commopt/probe", "commopt/cost", "bench/evidence/verdict.py"),
    "tuning": (*_STEP, "commopt/cost", "bench/evidence/tuning"),
}
"""What each kind of result measures, as paths of this repository. A new benchmark adds a line."""

TO_MEASURE_AGAIN: Mapping[str, str] = {}
"""Files that name no clean revision and are still shown, and why they were not made again. No file is added to it."""

_SHOWN = re.compile(r"^<!-- begin: [\w-]+ \(python -m ([^)]+)\) -->$", re.M)


@dataclass(frozen=True)
class Result:
    """A file of results."""

    path: Path
    kind: str
    date: str
    """The day, of the newest run where there are several; "" where it is not recorded."""
    revisions: Sequence[Revision]
    command: str

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read the headers of a file."""
        found = headers(path)
        revisions = {each for header in found for each in Revision.all_in(header.get("revision"))}
        return cls(
            path,
            (kind_in(found[0]) if found else None) or path.stem,
            max((header.get("date", "")[:10] for header in found), default=""),
            sorted(revisions, key=lambda revision: (revision.name or "", revision.is_clean)),
            next((header["command"] for header in found if header.get("command")), ""),
        )

    @property
    def is_trusted(self) -> bool:
        """Whether it names clean revisions only."""
        return bool(self.revisions) and all(revision.is_clean for revision in self.revisions)

    @property
    def made_at(self) -> str:
        """Its revisions in few words."""
        if not self.is_trusted:
            return "not recorded" if any(each.name is None for each in self.revisions) else "uncommitted changes"
        first, *others = [each.name or "" for each in self.revisions]
        return f"{first} and {len(others)} more" if others else first


def history_of(root: Path) -> str:
    """Return "", or why the history of the repository at `root` cannot be asked."""
    if not (root / ".git").exists():
        return "no git history here: this is no clone"
    shallow = _git(root, "rev-parse", "--is-shallow-repository")
    if shallow is None:
        return "no git history here: git cannot be run"
    return "the git history here is incomplete: git fetch --unshallow" if shallow == "true" else ""


def changes_since(root: Path, result: Result) -> str:
    """Say what has changed in the code that a result measures; "" where nothing has."""
    if result.kind not in MEASURES:
        return f"unknown: {Path(__file__).name} has no paths for {result.kind!r}"
    names = [each.name for each in result.revisions if each.name]
    if not names:
        return "unknown: no revision"
    found = []
    for name in names:
        changed = _git(root, "diff", "--shortstat", name, "--", *MEASURES[result.kind])
        if changed is None:
            return f"unknown: {name} is not in the history"
        found.append(changed)
    return max(found, key=_changed_lines)


def _changed_lines(shortstat: str) -> int:
    return sum(map(int, re.findall(r"\d+", shortstat)[1:]))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        return subprocess.check_output(
            ["git", "-C", str(root), *arguments], stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def pages(root: Path) -> dict[str, list[str]]:
    """Return the pages with a table of each file of results, by the file's path from `root`."""
    found: dict[str, list[str]] = {}
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        commands = _SHOWN.findall(page.read_text()) if page.exists() else []
        for word in dict.fromkeys(word for command in commands for word in command.split() if word.endswith(".json")):
            found.setdefault(word, []).append(str(page.relative_to(root)))
    return found


def report(root: Path) -> None:
    """Print a line for each file, and how to make again what is older than the code it measures."""
    problem, shown, folder = history_of(root), pages(root), root / "bench" / "results"
    results = [Result.read(path) for path in sorted(folder.rglob("*.json"))]
    rows, old = [("file", "made", "at revision", "changed since")], []
    for result in results:
        since = "unknown" if problem else changes_since(root, result)
        rows.append((str(result.path.relative_to(folder)), result.date, result.made_at, since or "nothing"))
        if since and not since.startswith("unknown"):
            old.append(result)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{len(results)} files; {sum(not result.is_trusted for result in results)} name no clean revision.")
    if problem:
        print(f"What has changed since is unknown: {problem}.")
        return
    print(f"{len(old)} are older than the code they measure. Where each is shown, and the command that makes it again:")
    for result in old:
        name = str(result.path.relative_to(root))
        print(f"\n{name}: {', '.join(shown.get(name, ['in no table']))}\n    {result.command or 'not recorded'}")


def main() -> int:
    """Report on this repository, or on the one of `--root`."""
    parser = CommandParser(prog="python -m bench.evidence.check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="a clone (default: this one)")
    report(parser.parse_args().root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
