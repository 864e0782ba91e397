# SPDX-License-Identifier: Apache-2.0
"""What a check reports: what was looked at, what it is, what it should be, and the command that fixes it."""

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
    """How bad it is, worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    OK = "ok"
    NOT_APPLICABLE = "not applicable"
    """What the check is about is not there."""

    @property
    def rank(self) -> int:
        """0 for the worst: findings sort by it."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One result of one check. What is left empty, the check that yields it adds."""

    severity: Severity
    value: str | None
    """What it said; None when it could not be read (then `expected` says why, and the severity is INFO)."""
    expected: str = ""
    """What it should be, and what it costs when it is not."""
    remedy: str | None = None
    """A command or a setting; None when there is nothing to do."""
    confidence: str = "high"
    """How sure the check is that this is what makes communication slow: "high", "medium", "low"."""
    read: str = ""
    """The file, variable or call that was looked at."""
    check: str = ""
    """The check's id: "memlock"."""
    title: str = ""
    """The check's name for people."""
    nodes: tuple[str, ...] = ()
    """The machines that reported it; empty when only this one was asked."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "severity": self.severity.value, "nodes": list(self.nodes)}

    @classmethod
    def from_dict(cls, given: object) -> Finding:
        """Return the finding of `as_dict`; raises ValueError for anything else, as another rank may send it."""
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


# Broken or several times slower than it could be; costs speed, probably or in a likely situation; worth knowing; fine.
error = partial(Finding, Severity.ERROR)
warning = partial(Finding, Severity.WARNING)
info = partial(Finding, Severity.INFO)
ok = partial(Finding, Severity.OK)
absent = partial(Finding, Severity.NOT_APPLICABLE)
FINE = (Severity.OK, Severity.NOT_APPLICABLE)
"""Nothing to do."""


def unread(why: str, remedy: str | None = None, read: str = "") -> Finding:
    """Could not be looked at: never passed over in silence."""
    return Finding(Severity.INFO, None, why, remedy, "low", read)


class Unread(Exception):
    """Raised by what a check asks for and cannot be read; the check then ends with such a finding."""

    def __init__(self, why: str, remedy: str | None = None, read: str = "") -> None:
        super().__init__(why)
        self.finding = unread(why, remedy, read)


@dataclass(frozen=True)
class Check(Generic[T]):
    """A look at a machine, a log or the ranks of a job."""

    id: str
    title: str
    read: str
    expected: str
    """What is reported as fine when nothing else is; "" reports nothing then."""
    remedy: str | None
    look: Callable[[T], Iterable[Finding]]
    needs: tuple[tuple[Callable[[T], object], str], ...] = ()
    """What the check is about ("no GPU" where the first is false): without it nothing found is no good sign."""

    def __call__(self, subject: T) -> list[Finding]:
        """Return what is worth telling about `subject`, in the order of repair."""
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
        """Return a finding with this check's id and title, and what it left to the check."""
        read, expected = finding.read or self.read, finding.expected or self.expected
        wrong = finding.value is not None and finding.severity not in FINE
        remedy = self.remedy if wrong and finding.remedy is None else finding.remedy
        return replace(finding, check=self.id, title=self.title, read=read, expected=expected, remedy=remedy)


def check(
    read: str, remedy: str | None = None, needs: tuple[tuple[Callable[[T], object], str], ...] = ()
) -> Callable[[Callable[[T], Iterable[Finding]]], Check[T]]:
    """Make a check of a function that yields findings: errors, warnings and notes, or nothing where all is fine.

    needs: what has to be there for that, and what is said where it is not. Its name is the check's id. Its docstring is
    the check's title, a colon, and what is expected.
    """

    def made(look: Callable[[T], Iterable[Finding]]) -> Check[T]:
        # Under python -OO a function has no docstring; its source has.
        text = look.__doc__ or ast.get_docstring(ast.parse(getsource(look)).body[0]) or ""  # type: ignore[arg-type]
        title, _, expected = " ".join(text.split()).rstrip(".").partition(": ")
        return Check(look.__name__.replace("_", "-"), title, read, expected, remedy, look, needs)

    return made


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity; within one severity keep the order of the checks, which is the order of repair."""
    return sorted(findings, key=lambda finding: finding.severity.rank)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Say once what several machines reported in the same words, with the names of all of them."""
    nodes: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        nodes.setdefault(replace(finding, nodes=()), {}).update(dict.fromkeys(finding.nodes))
    return [replace(finding, nodes=tuple(named)) for finding, named in nodes.items()]


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 3 when there is an error, 1 when there is a warning, else 0."""
    severities = {finding.severity for finding in findings}
    return 3 if Severity.ERROR in severities else 1 if Severity.WARNING in severities else 0
