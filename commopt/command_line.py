# SPDX-License-Identifier: Apache-2.0
"""Shared parts of all commands: one line and status 2 for bad input, bounded numbers, files checked before the work."""

from __future__ import annotations

import argparse
import os
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from commopt.document import plain_file, reason_of
from commopt.errors import ConfigurationError, did_you_mean

_T = TypeVar("_T")

BAD_INPUT = 2
"""Exit status of every command for invalid arguments and files; that of argparse."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_MOST = 2**40  # more of anything is a slip of the keyboard
_LONGEST_LINE = 600
_LONGEST = 40  # length of a number in a message


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line, with a suggestion if there is a similar name, and exit with status 2."""
        self.exit(refuse(self.prog, f"{message}{self._suggestion(message) or ';'} see --help"))

    def _suggestion(self, message: str) -> str:
        """Return similar choices or options, of this command or a subcommand, for argparse's message."""
        if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            return did_you_mean(choice[1], re.findall(r"[\w.:+-]+", choice[2]))
        if unknown := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            return did_you_mean(unknown[1], self._options())
        return ""

    def _options(self) -> list[str]:
        """Return the long options of this parser and of its subcommands."""
        inner = [
            each for action in self._actions if isinstance(action.choices, dict) for each in action.choices.values()
        ]
        found = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        return found + [name for each in inner if isinstance(each, CommandParser) for name in each._options()]


def refuse(program: str, why: object) -> int:
    """Print in one line on stderr why a command cannot use its input, and return its exit status."""
    line = " ".join(str(why).split())
    if len(line) > _LONGEST_LINE:  # the argument may be a whole file
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    sys.stderr.write(f"{program}: {line}\n")  # in one piece: all ranks write at once
    return BAD_INPUT


def rich_console(stream: TextIO) -> Any | None:
    """Return rich's console on `stream`, in colour on a terminal; None, for plain text, if rich is not installed.

    On a terminal a line names the missing package.
    """
    try:
        from rich.console import Console
    except ImportError:
        if stream.isatty():
            sys.stderr.write("plain output, since rich is not installed: pip install rich for colours\n")
        return None
    return Console(file=stream, soft_wrap=True, highlight=False)


def reader_has_gone() -> None:
    """Redirect stdout to the null device after a BrokenPipeError (`| head`), or Python complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _shown(most: float) -> str:
    """Return a bound in readable form."""
    return "about 1e12" if most == _MOST else f"{most:,}" if isinstance(most, int) else f"{most:g}"


def whole(least: int = 0, most: int = _MOST) -> Callable[[str], int]:
    """Return a `type=` for whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        # Not int() alone: it accepts "1_000" and digits of any script, and takes very long text.
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:_LONGEST]!r} is not a whole number from {least} to {_shown(most)}"
            )
        return int(text)

    return parse


def number(above: float = 0.0, most: float = float(_MOST), least: float | None = None) -> Callable[[str], float]:
    """Return a `type=` for finite numbers above `above`, or from `least`, up to `most`."""
    from_where = f"more than {above:g}" if least is None else f"at least {least:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (isfinite(value) and (above < value if least is None else least <= value) and value <= most):
            raise argparse.ArgumentTypeError(
                f"{text[:_LONGEST]!r} is not a number that is {from_where} and at most {_shown(most)}"
            )
        return value

    return parse


def parse_nbytes(text: str) -> int:
    """Return the bytes of `1024`, `4K`, `1.5M` or `1G` (powers of 1024), as a `type=`."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([KMG]?)(?:I?B)?", text.strip().upper())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 1 <= nbytes <= _MOST:
        raise argparse.ArgumentTypeError(
            f"{text[:_LONGEST]!r} is not a number of bytes, 1 to {_MOST >> 40} TiB; write 1024, 4K, 32M or 1G"
        )
    return nbytes


def option_value(text: str) -> Any:
    """Return an option's value as a Python literal (8, True, ("a", "b")), otherwise the text itself."""
    try:
        return literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: a set of lists
        return text


def content_of(read: Callable[[Path], _T]) -> Callable[[str], _T]:
    """Return a `type=` for a file that `read` reads; its ValueError or OSError means bad input."""

    def parse(text: str) -> _T:
        try:
            return read(plain_file(text))
        except (OSError, ValueError, RecursionError) as error:
            why = str(error)
            raise argparse.ArgumentTypeError(why if text in why else f"{text}: {why}") from None

    return parse


def output_file(text: str) -> Path:
    """Return the path of a file that rank 0 will write, as a `type=`. Refuses one that cannot be opened."""
    path = Path(text)
    if os.environ.get("RANK", "0") == "0":  # the folder need not exist on the other machines
        try:
            require_writable(path)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return path


def require_writable(path: Path) -> None:
    """Raise ConfigurationError unless `path` can be opened for writing. Leaves no new file behind."""
    try:
        if not path.is_char_device():  # /dev/null is fine
            plain_file(path)
        target = Path(os.path.realpath(path))  # of a link, which stays, the file
        try:
            target.open("x").close()
        except FileExistsError:
            target.open("a").close()
        else:
            target.unlink(missing_ok=True)  # another rank may check the same file
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be written: {reason_of(error)}; pass a file in a folder that exists"
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ConfigurationError, which names file and reason, where `path` can be written no more after the work."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {reason_of(error)}; pass another file, or make room for it"
        ) from None
