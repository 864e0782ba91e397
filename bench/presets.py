# SPDX-License-Identifier: Apache-2.0
"""The defaults of every preset's options, as a table for a document: `python -m bench.presets`."""

from __future__ import annotations

import inspect
from inspect import Parameter

from bench.document import table
from commopt.command_line import CommandParser
from commopt.hooks.presets import LOCAL_PRESETS, PRESETS, Preset


def defaults(preset: Preset) -> str:
    """Return its options and their defaults as they are typed, "none" where it has no options."""
    options = [each for each in inspect.signature(preset).parameters.values() if each.kind is Parameter.KEYWORD_ONLY]
    return ", ".join(f"`{each.name}={each.default!r}`" for each in options) or "none"


def main() -> None:
    """Print the table; presets with the same options share a row."""
    CommandParser(prog="python -m bench.presets", description=(__doc__ or "").splitlines()[0]).parse_args()
    names: dict[str, list[str]] = {}
    for name, preset in (PRESETS | LOCAL_PRESETS).items():
        names.setdefault(defaults(preset), []).append(f"`{name}`")
    print(table(["preset", "options and their defaults"], [[", ".join(found), told] for told, found in names.items()]))


if __name__ == "__main__":
    main()
