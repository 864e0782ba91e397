"""What a session on a GPU came to: its records, and their file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.json_lines import write_lines

KIND = "gpu"

Verdict = Literal["passed", "failed", "timed out", "not judged", "skipped"]


@dataclass(frozen=True)
class Counted:
    """What pytest counted; `failures` names the tests that failed, `late` those of them that only took too long."""

    passed: int
    failed: int
    skipped: int
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """A figure that is asked for; `measured` and `met` are None where there was nothing to compare with."""

    what: str
    asked: str
    measured: float | None
    met: bool | None


@dataclass(frozen=True)
class Outcome:
    """One step. `why` says what went wrong, or why it was skipped; `facts` are what else is worth keeping."""

    name: str
    command: str
    date: str
    seconds: float
    verdict: Verdict
    why: str = ""
    tests: Counted | None = None
    asked: list[Asked] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def fell_through(self) -> bool:
        """Whether it ran and did not pass."""
        return self.verdict in ("failed", "timed out")


def write(path: Path, environment: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write one JSON object per line, each naming its kind under "record"; a killed writer leaves the old file."""
    records = [{"record": "environment", "kind": KIND, **environment}]
    records += [{"record": "step", **asdict(outcome)} for outcome in outcomes]
    write_lines(path, records)


def read(path: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    try:
        environment, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if environment.pop("record") != "environment" or environment.pop("kind") != KIND:
            raise ValueError("its first line is no environment of a GPU session")
        return environment, [_outcome(row) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file that bench.gpu wrote: {error}") from error


def _outcome(row: dict[str, Any]) -> Outcome:
    if row.pop("record") != "step":
        raise ValueError("unexpected kinds of records")
    tests, asked = row.pop("tests"), row.pop("asked")
    return Outcome(**row, tests=Counted(**tests) if tests else None, asked=[Asked(**each) for each in asked])


def merged(old: Sequence[Outcome], new: Sequence[Outcome], order: Sequence[str]) -> list[Outcome]:
    """Return the new outcomes and, of the other steps, the old ones; in `order`."""
    by_name = {outcome.name: outcome for outcome in (*old, *new)}
    return [by_name[name] for name in order if name in by_name]
