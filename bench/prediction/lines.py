"""Files of JSON lines: the environment of a run, then what was found in it; any number of runs in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Environment = TypeVar("Environment", bound="World")
Found = TypeVar("Found")


@dataclass(frozen=True)
class World:
    """Where and how numbers were made; nodes: ranks on each."""

    date: str
    torch: str
    python: str
    cpu_count: int
    command: str
    world_size: int
    emulated_rate: str | None
    nodes: list[int]

    @property
    def cluster(self) -> str:
        """The cluster in words."""
        return f"{'+'.join(map(str, self.nodes))} ranks, {self.emulated_rate or 'no emulated link'}"


def append(path: Path, kind: str, environment: Mapping[str, Any], configurations: Sequence[Mapping[str, Any]]) -> None:
    """Add a run to a file: its environment, which says what `kind` of file it is, and what was found."""
    records = [{"record": "environment", "kind": kind, **environment}]
    records += [{"record": "configuration", **each} for each in configurations]
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(
    path: Path, kind: str, environment: type[Environment], configuration: type[Found]
) -> list[tuple[Environment, list[Found]]]:
    """Read what `append` wrote of dataclasses; raises ValueError when the file holds something else."""
    runs: list[tuple[Environment, list[Found]]] = []
    try:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry.pop("record") == "environment":
                if (made_by := entry.pop("kind")) != kind:
                    raise ValueError(f"its kind is {made_by!r}")
                runs.append((environment(**entry), []))
            else:
                runs[-1][1].append(configuration(**entry))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is not a file that bench.{kind} --json wrote: {error}") from error
    return runs
