# SPDX-License-Identifier: Apache-2.0
"""Findings of checks: the source that was read, its value, the expected value, and the remedy."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from functools import partial
from inspect import getsource
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LONGEST = 20_000
"""Characters of a text that another rank sends."""


class Severity(Enum):
    """Severity of a finding, worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    OK = "ok"
    NOT_APPLICABLE = "not applicable"
    """The machine lacks the subject of the check."""

    @property
    def rank(self) -> int:
        """0 for the worst: findings sort by it."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One result of one check, which fills the fields left empty."""

    severity: Severity
    value: str | None
    """The value read; None if it could not be read (then `expected` holds the reason, and the severity is INFO)."""
    expected: str = ""
    """The expected value, and the cost of any other."""
    remedy: str | None = None
    """A command or a setting; None if there is nothing to do."""
    confidence: str = "high"
    """Confidence that this makes communication slow: "high", "medium", "low"."""
    read: str = ""
    """The file, variable or call that was read."""
    check: str = ""
    """The check's id: "memlock"."""
    title: str = ""
    """The readable name of the check."""
    nodes: tuple[str, ...] = ()
    """The machines that reported it; empty if only this one was examined."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "severity": self.severity.value, "nodes": list(self.nodes)}

    @classmethod
    def from_dict(cls, given: object) -> Finding:
        """Return the finding of a result of `as_dict`. Raises ValueError for anything else: another rank sends it."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or sorted(given) != sorted(names):
            raise ValueError("no finding")
        texts = {name: given[name] for name in names if name not in ("severity", "nodes")}
        for name, text in texts.items():
            if (
                not (isinstance(text, str) or (text is None and name in ("value", "remedy")))
                or len(text or "") > LONGEST
            ):
                raise ValueError(f"a finding with a wrong {name}")
        nodes = given["nodes"]
        if not isinstance(nodes, list) or not all(isinstance(node, str) and len(node) <= LONGEST for node in nodes):
            raise ValueError("a finding with wrong nodes")
        return cls(severity=Severity(given["severity"]), nodes=tuple(nodes), **texts)


# Error: broken, or several times slower than possible. Warning: probably slower. Info: useful to know. Ok: fine.
error = partial(Finding, Severity.ERROR)
warning = partial(Finding, Severity.WARNING)
info = partial(Finding, Severity.INFO)
ok = partial(Finding, Severity.OK)
absent = partial(Finding, Severity.NOT_APPLICABLE)
FINE = (Severity.OK, Severity.NOT_APPLICABLE)
"""Severities that need no action."""


def unread(why: str, remedy: str | None = None, read: str = "") -> Finding:
    """Return the finding that a source could not be read."""
    return Finding(Severity.INFO, None, why, remedy, "low", read)


class Unread(Exception):
    """Raised for a source that cannot be read. The check then ends with the finding `unread`."""

    def __init__(self, why: str, remedy: str | None = None, read: str = "") -> None:
        super().__init__(why)
        self.finding = unread(why, remedy, read)


@dataclass(frozen=True)
class Check(Generic[T]):
    """A check of a machine, a log or the ranks of a job."""

    id: str
    title: str
    read: str
    expected: str
    """Reported as fine if there is no other finding; "" reports nothing."""
    remedy: str | None
    look: Callable[[T], Iterable[Finding]]
    needs: tuple[tuple[Callable[[T], object], str], ...] = ()
    """Conditions for the check to apply, with the text for their absence ("no GPU")."""

    def __call__(self, subject: T) -> list[Finding]:
        """Return the findings about `subject` in the order of repair."""
        found: list[Finding] = []
        try:
            found.extend(self.look(subject))
        except Unread as missing:
            found.append(missing.finding)
        if not found and self.expected:
            lacking = next((without for there, without in self.needs if not there(subject)), None)
            found = [ok("nothing to fix") if lacking is None else absent(lacking)]
        return [self.named(finding) for finding in found]

    def named(self, finding: Finding) -> Finding:
        """Return a finding with this check's id, title, and defaults for empty fields."""
        read, expected = finding.read or self.read, finding.expected or self.expected
        wrong = finding.value is not None and finding.severity not in FINE
        remedy = self.remedy if wrong and finding.remedy is None else finding.remedy
        return replace(finding, check=self.id, title=self.title, read=read, expected=expected, remedy=remedy)


def check(
    read: str, remedy: str | None = None, needs: tuple[tuple[Callable[[T], object], str], ...] = ()
) -> Callable[[Callable[[T], Iterable[Finding]]], Check[T]]:
    """Make a check of a function that yields findings: errors, warnings and notes, or nothing if all is fine.

    The function's name is the check's id. Its docstring is the check's title, a colon, and the expected value.

    read: the source that the check reads.
    remedy: the default remedy.
    needs: conditions for the check to apply, with the text for their absence.
    """

    def made(look: Callable[[T], Iterable[Finding]]) -> Check[T]:
        # Under python -OO the function has no docstring, but its source has.
        text = look.__doc__ or ast.get_docstring(ast.parse(getsource(look)).body[0]) or ""  # type: ignore[arg-type]
        title, _, expected = " ".join(text.split()).rstrip(".").partition(": ")
        return Check(look.__name__.replace("_", "-"), title, read, expected, remedy, look, needs)

    return made


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by severity. Within one severity they keep the order of the checks, the order of repair."""
    return sorted(findings, key=lambda finding: finding.severity.rank)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Combine equal findings of several machines, with the names of all these machines."""
    nodes: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, nodes=()), {}).update(dict.fromkeys(finding.nodes))
    return [replace(finding, nodes=tuple(named)) for finding, named in nodes.items()]


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 3 if there is an error, 1 if there is a warning, else 0."""
    severities = {finding.severity for finding in findings}
    return 3 if Severity.ERROR in severities else 1 if Severity.WARNING in severities else 0
