# SPDX-License-Identifier: Apache-2.0
"""The words of alarms: who is silent, who is missing in which task, and what each was last seen to do."""

from __future__ import annotations

from typing import Any

Beat = dict[str, Any]


def silent_text(rank: int, beat: Beat, silent_s: float) -> str:
    """Return what is said of a rank without heartbeat."""
    return (
        f"no heartbeat from rank {rank}{_process(beat)} for {silent_s:.0f} s: it is stopped, its machine is down or "
        f"cut off from the network, or something in it holds Python's lock; last seen {_doing(beat)}"
    )


def waits_text(alarm: Beat) -> str:
    """Return what is said of a task in which ranks wait."""
    wait = f"{alarm['waiting']} rank(s) wait for {alarm['waited_s']:.0f} s in {alarm['task']}"
    missing = [
        f"rank {rank}{_process(beat)}, {'it has left' if 'left' in beat else _doing(beat)}"
        for rank, beat in alarm["missing"].items()
    ]
    if missing:
        more = f" and {alarm['more']} more" if alarm["more"] else ""
        return f"{wait}; still missing: {'; '.join(missing)}{more}"
    elsewhere = "; ".join(f"rank {rank} is in {what}" for rank, what in alarm["others"].items())
    if elsewhere:
        return f"{wait}: {elsewhere}"
    return f"{wait}, and none is missing: the network is slow or cut, or a kernel does not end"


def _process(beat: Beat) -> str:
    return f" ({beat['host']}, process {beat['pid']})" if "pid" in beat else ""


def _doing(beat: Beat) -> str:
    if "phase" not in beat:
        return "before its first beat"
    latest = max(beat["clients"].values(), key=lambda numbers: numbers[1], default=[-1, -1, -1])
    step = f"step {latest[1]}, bucket {latest[2]}, " if latest[1] >= 0 else ""
    tasks = "".join(
        f", its lane in {each['title']} ({each['owner']}, operation {each['sequence']})"
        for each in beat["lanes"].values()
    )
    return f"in {step}phase {beat['phase']}, at {' < '.join(beat['stack'][:4])}{tasks}"
