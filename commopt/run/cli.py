# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt run`: train with a strategy and leave the script as it is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any, TextIO

from commopt.command_line import BAD_INPUT, output_file, refuse, require_writable, whole, writing
from commopt.display import aligned, significant
from commopt.errors import ConfigurationError
from commopt.hooks.presets import LOCAL_PRESETS, PRESETS
from commopt.run.live import Live
from commopt.run.models import Models, Trained, watching
from commopt.run.processes import following
from commopt.run.script import Choice, Script

USAGE = (
    "torchrun ... -m commopt run --strategy NAME[:OPTION=VALUE...]\n"
    "           [--option OPTION=VALUE] [--tuned FILE] [--live] [--report]\n"
    "           [--html FILE] SCRIPT ARGS..."
)
EPILOG = f"""{fill("presets: " + ", ".join(sorted(PRESETS | LOCAL_PRESETS)), 79, subsequent_indent="  ")}
Each is explained in docs/usage.md; docs/presets.md says which to take. With
adam= the script's AdamW becomes the SGD that goes behind Adam's directions,
with its groups, learning rates, weight decays and schedulers (docs/adamw.md).
A model whose hook the script has registered itself is left alone. Give every
rank the same command.

exit status: the script's; {BAD_INPUT} bad input (one line on stderr, on every rank,
before the script starts)."""
NOTHING = (
    "commopt run: no model of DistributedDataParallel or fully_shard was trained, so there was nothing to do; start "
    "one process for each GPU with torchrun, or in the script with multiprocessing (other programs that it starts are "
    "not seen)"
)
_HEADINGS = ("model", "averaged by", "steps", "MB per step\nin the node", "MB per step\nbetween nodes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of run."""
    parser.usage = USAGE
    parser.description = "Run a training script unchanged; each model of DDP or FSDP2 gets a hook."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--strategy", required=True, metavar="NAME", help="a preset and its options: hierarchical_quantized:bits=4")
    add(
        "--option",
        dest="settings",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="another option of commopt.attach: plan=ddp, links=links.json, ranks_per_node=8; may be repeated",
    )
    what = "where rank 0 writes at the end what auto has chosen, and what it begins with if the file is there already"
    add("--tuned", type=Path, metavar="FILE", help=what)
    add("--report", action="store_true", help="print at the end what was sent, and a verdict with remedies, on rank 0")
    add("--live", action="store_true", help="print where the time goes every so many steps, on rank 0")
    add("--html", type=output_file, metavar="FILE", help="write the same as a page with pictures, each time anew")
    add(
        "--every",
        type=whole(1),
        default=50,
        metavar="STEPS",
        help="how often --live and --html show something (default 50)",
    )
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="the script and its arguments")


def run(options: argparse.Namespace) -> int:
    """Run the script and return 0 when it ends by itself; its exceptions, SystemExit too, pass through."""
    try:
        if not options.script:
            raise ConfigurationError(f"no script was named; {USAGE}")
        script = Script(options.script[0], tuple(options.script[1:]), options.module)
        choice = Choice.read(options.strategy, options.settings, options.tuned)
        if options.tuned is not None and os.environ.get("RANK", "0") == "0":
            require_writable(options.tuned)
        script.require_there()
    except ConfigurationError as error:
        return refuse("commopt run", error)
    others = active_children()
    with TemporaryDirectory(prefix="commopt-run-") as marks:
        shown = Shown(options.report, options.live, options.html, options.every)
        script_run = ScriptRun(choice, script, shown, tuple(options.settings), marks, options.tuned)
        try:
            script_run.run(script.run)
        except SystemExit:
            _tell_of_nothing(marks, others)
            raise
        _tell_of_nothing(marks, others)
    return 0


def _tell_of_nothing(marks: str, others: Sequence[object]) -> None:
    nothing = not any(Path(marks).iterdir()) and not [each for each in active_children() if each not in others]
    if nothing and os.environ.get("RANK", "0") == "0":
        print(NOTHING, file=sys.stderr)


@dataclass(frozen=True)
class Shown:
    """The output that was asked for: at the end, and every so many steps, as lines and as a page."""

    report: bool
    live: bool
    html: Path | None
    every: int

    def options(self) -> list[str]:
        """Return the flags of a command line that ask for the same."""
        flags = ["--report"] * self.report + ["--live"] * self.live
        return [*flags, *(["--html", str(self.html)] if self.html else []), "--every", str(self.every)]


@dataclass(frozen=True)
class ScriptRun:
    """A run of the script, in this process and in all processes that it starts.

    marks: a folder in which each process that has trained leaves a file, while the folder is there.
    tuned: the file that keeps what auto has chosen.
    """

    choice: Choice
    script: Script
    shown: Shown
    settings: tuple[str, ...]
    marks: str
    tuned: Path | None = None

    def run(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Call the function, and attach to the models that are trained in it."""
        shown = self.shown
        live = Live(shown.every, shown.live, shown.html) if shown.live or shown.html else None
        models = Models(self.choice, live, records=shown.report or shown.html is not None)
        ended, made = None, None
        try:
            with watching(models), following(self.run, self.again):
                made = function(*args, **kwargs)
        except SystemExit as error:
            ended = error  # its traceback holds on to the script's objects
        self._conclude(models, live, ended)
        if ended is not None:
            raise ended
        del made

    def again(self, program: Any) -> Any:
        """Return the arguments of a program; if it is the script again, the arguments that run it with commopt too."""
        name = self.script.target
        heads = [["-m", name], ["-m", f"{name}.__main__"]] if self.script.is_module else [[os.path.abspath(name)]]
        if not isinstance(program, (list, tuple)):
            return program
        if not any(list(program[: 1 + len(head)]) == [sys.executable, *head] for head in heads):
            return program
        options = [each for setting in self.settings for each in ("--option", setting)]
        options += ["--tuned", str(self.tuned)] if self.tuned else []
        options += self.shown.options()
        return [program[0], "-m", "commopt", "run", "--strategy", self.choice.strategy, *options, *program[1:]]

    def _conclude(self, models: Models, live: Live | None, ended: SystemExit | None) -> None:
        """Print what was asked for. ended: what the script has ended with."""
        models.end(ended)
        models.close()
        if models.seen:
            with suppress(OSError):  # the process that made the folder did not wait for this one
                Path(self.marks, str(os.getpid())).touch()
            if self.shown.report:
                show(models.trained)
            _show_verdict(models.trained, printed=self.shown.report)
            if self.tuned is not None:
                _keep(models.trained, self.tuned)
        if live is not None and not live.steps and any(record.rank == 0 for record in models.trained):
            why = f"no model took {live.every} steps, so nothing was shown; pass --every N with fewer"
            print(f"commopt run: {why}", file=sys.stderr)


def _keep(trained: Sequence[Trained], file: Path) -> None:
    """Write the result of tuning the first model, on the world's first rank."""
    found = next((record.tuned for record in trained if record.rank == 0 and record.tuned), None)
    if found is not None:
        try:
            with writing(file):
                found.save(file)
        except ConfigurationError as error:  # the training has ended well: its status stays
            refuse("commopt run", f"what auto chose is lost: {error}")
            return
        print(f"commopt run: what auto chose is in {file}", file=sys.stderr)
    elif any(record.rank == 0 for record in trained):
        print(f"commopt run: auto had not chosen when training ended; {file} is as it was", file=sys.stderr)


def show(trained: Sequence[Trained], stream: TextIO | None = None) -> None:
    """Print a line for each model, on the world's first rank."""
    mine = [record for record in trained if record.rank == 0]
    if not mine:
        return
    lines = ["", *aligned(_HEADINGS, [_row(record) for record in mine], left=2)]
    for record in mine:
        if record.explanation:
            lines += ["", f"{record.name}:", record.explanation]
    print(*lines, sep="\n", file=stream or sys.stdout, flush=True)


def _show_verdict(trained: Sequence[Trained], *, printed: bool) -> None:
    """Print the verdict on the model that waits longest, and put all on the pages; one line where that fails."""
    mine = [(record, recorded) for record in trained if record.rank == 0 and (recorded := record.recorded) is not None]
    if not mine:
        return
    try:
        from commopt.doctor import observe
        from commopt.doctor.verdict.recording import verdict_on
        from commopt.doctor.verdict.show import lines_of
        from commopt.timeline.page import write_page

        machine = observe()
        found = [verdict_on(recorded, machine) for _, recorded in mine]
        if printed:
            most = max(found, key=lambda verdict: verdict.training.exposed_ms if verdict.training else 0.0)
            print("", *lines_of(most), sep="\n", flush=True)
        for (record, of), verdict in zip(mine, found, strict=True):
            if record.page is not None and of.report is not None:
                write_page(record.page, of.timeline, of.report, of.explanation, of.reasons, lines_of(verdict))
    except Exception as error:  # whatever it is, the training has ended well
        said = " ".join(str(error).split())
        print(f"commopt run: no verdict: {type(error).__name__}: {said}", file=sys.stderr)


def _row(record: Trained) -> tuple[str, ...]:
    stats = record.stats
    steps = stats["steps"]
    sent = (stats[f"{level}_bytes"] / max(steps, 1) / 1e6 for level in ("intra", "inter"))
    return (record.name, stats["aggregator"], str(steps), *(significant(mb, 4) for mb in sent))
