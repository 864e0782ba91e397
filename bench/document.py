# SPDX-License-Identifier: Apache-2.0
"""Put figures into Markdown documents, between two marks that stand there: `python -m bench.document`, seconds.

Between `<!-- begin: NAME (COMMAND) -->` and `<!-- end -->` stands what COMMAND prints, from a file of bench/results,
and when and with which code that was made.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from bench.environment import origin
from commopt.command_line import CommandParser
from commopt.document import read_text

_PLACE = re.compile(r"^(<!-- begin: [\w-]+ \(python -m ([^)]+)\) -->\n)(.*?)^(<!-- end -->)$", re.M | re.S)


def filled(text: str) -> str:
    """Return a document with what its commands print now; they run here, from the root of the project.

    Raises ValueError where marks do not come in pairs, or a command fails.
    """
    marks = re.findall(r"^<!-- (begin|end)(?=: | -->)", text, re.M)
    if marks != ["begin", "end"] * (len(marks) // 2):
        raise ValueError(
            f"its marks do not come in pairs: {' '.join(marks)}; write <!-- begin: ... --> and <!-- end -->"
        )
    return _PLACE.sub(lambda found: f"{found[1]}{_printed(found[2])}\n{found[4]}", text)


def _printed(command: str) -> str:
    module, *arguments = shlex.split(command)
    before, out = sys.argv, StringIO()
    try:
        sys.argv = [module, *arguments]
        with redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of runpy: another command may have imported the module
            runpy.run_module(module, run_name="__main__")
    except (ImportError, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code:
            raise ValueError(f"python -m {command} fails: {error}") from None
    finally:
        sys.argv = before
    made = origin([Path(word) for word in arguments if word.endswith(".json")])
    return f"{out.getvalue().rstrip()}\n\n{made}".rstrip()


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a line break or a bar inside of a cell would end it."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Fill in what is out of date, or only name it; return the exit status."""
    parser = CommandParser(prog="python -m bench.document", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "documents", nargs="*", type=Path, default=[Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
    )
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if anything is out of date")
    options = parser.parse_args()
    stale = False
    for document in options.documents:
        try:
            text = read_text(document)
            new = filled(text)
        except ValueError as error:
            parser.error(f"{document}: {error}")
        if new != text:
            stale = True
            print(f"{document}: {'out of date' if options.check else 'filled in'}")
            if not options.check:
                document.write_text(new)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
