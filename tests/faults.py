# SPDX-License-Identifier: Apache-2.0
"""Faults that the gate must find: one in each promise of docs/design.md and in each package (see mutants.py)."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of the one place in `file` where `before` stands; `tests`: names of the test files to run first."""

    name: str
    file: str
    before: str
    after: str
    promise: str
    tests: tuple[str, ...]


FAULTS: tuple[Fault, ...] = (
    Fault(
        "a residual has the wrong sign",
        "commopt/kernels/residual.py",
        "x",
        "y",
        "nothing is lost",
        ("test_compressors",),
    ),
)
