# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it goes on: a line every so many steps, and a page that is written anew each time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from commopt.attached.log import Logged, StepLog
from commopt.hooks import CommState
from commopt.timeline.page import write_page


@dataclass
class Live:
    """Watches the models of a script. every: steps. lines: whether to print them. html: the first model's page.

    Those of further models, html-2 and so on, lie beside it. steps: after which something was shown last.
    """

    every: int
    lines: bool = False
    html: Path | None = None
    steps: int = 0
    _models: int = 0

    def watch(self, name: str, state: CommState, *, speaks: bool) -> Path | None:
        """Show a model from now on, if this rank `speaks`, and return its page; collective over the state's ranks."""
        self._models += 1
        file = self.html
        if file is not None and self._models > 1:
            file = file.with_stem(f"{file.stem}-{self._models}")

        def show(now: Logged) -> None:
            self.steps = now.step
            if not speaks or now.report is None:  # it speaks for its ranks, but not for the world
                return
            if self.lines:
                strategy = repr(state.aggregator) if state.plan is None else state.plan.strategy
                print(f"{name} {line(now, strategy)}", flush=True)
            if file is not None:
                write_page(file, now.timeline, now.report, state.explain(), [each.reason for each in state.decisions])

        StepLog(state._registration, state.stats, lambda: state.plan, self.every, lambda: show)
        return file


def line(now: Logged, strategy: str) -> str:
    """Return the latest figures in one line: times in milliseconds, payload of the first rank in 1e6 bytes."""
    step_ms, exposed_ms, inside, outside = (
        now.scalars[f"comm/{name}"] for name in ("step_ms", "exposed_ms", "intra_bytes", "inter_bytes")
    )
    times = f"{step_ms:.1f} ms a step, exposed {exposed_ms:.1f} ms ({exposed_ms / step_ms:.0%})"
    return (
        f"step {now.step}: {times}, {(inside + outside) / 1e6:.3g} MB ({outside / 1e6:.3g} to other nodes), {strategy}"
    )
