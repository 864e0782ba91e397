"""What a check reports: what was looked at, what it is, what it should be, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

Confidence = Literal["high", "medium", "low"]
T = TypeVar("T")


class Severity(Enum):
    """How bad it is, worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    OK = "ok"

    @property
    def rank(self) -> int:
        """0 for the worst: findings sort by it."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One result of one check."""

    check: str
    """The check's id: "memlock"."""
    title: str
    """The check's name for people."""
    severity: Severity
    read: str
    """The file, variable or call that was looked at."""
    value: str | None
    """What it said; None when it could not be read (then `expected` says why, and the severity is INFO)."""
    expected: str
    """What it should be, and what it costs when it is not."""
    remedy: str | None = None
    """A command or a setting; None when there is nothing to do."""
    confidence: Confidence = "high"
    """How sure the check is that this is what makes communication slow."""
    nodes: tuple[str, ...] = ()
    """The machines that reported it; empty when only this one was asked."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "severity": self.severity.value, "nodes": list(self.nodes)}


# The five below leave id and title to the check that yields them; without `read`, that is the check's too.


def error(value: str, expected: str, remedy: str, confidence: Confidence = "high", read: str = "") -> Finding:
    """Broken, or several times slower than it could be."""
    return Finding("", "", Severity.ERROR, read, value, expected, remedy, confidence)


def warning(value: str, expected: str, remedy: str, confidence: Confidence = "high", read: str = "") -> Finding:
    """Probably costs speed, or will break in a likely situation."""
    return Finding("", "", Severity.WARNING, read, value, expected, remedy, confidence)


def info(
    value: str, expected: str, remedy: str | None = None, confidence: Confidence = "high", read: str = ""
) -> Finding:
    """Worth knowing."""
    return Finding("", "", Severity.INFO, read, value, expected, remedy, confidence)


def ok(value: str, expected: str = "", read: str = "") -> Finding:
    """As it should be; without `expected`, that is the check's."""
    return Finding("", "", Severity.OK, read, value, expected)


def unread(why: str, remedy: str | None = None, read: str = "") -> Finding:
    """Could not be looked at: never passed over in silence."""
    return Finding("", "", Severity.INFO, read, None, why, remedy, "low")


@dataclass(frozen=True)
class Check(Generic[T]):
    """A look at a machine, a log or the ranks of a job."""

    id: str
    title: str
    read: str
    expected: str
    """What is reported as fine when nothing else is; "" reports nothing then."""
    look: Callable[[T], Iterable[Finding]]

    def __call__(self, subject: T) -> list[Finding]:
        """Return what is worth telling about `subject`, in the order of repair."""
        found = list(self.look(subject))
        if not found and self.expected:
            found = [ok("nothing to fix")]
        return [self.named(finding) for finding in found]

    def named(self, finding: Finding) -> Finding:
        """Return a finding with this check's id and title, and what it left to the check."""
        read, expected = finding.read or self.read, finding.expected or self.expected
        return replace(finding, check=self.id, title=self.title, read=read, expected=expected)


def check(id: str, title: str, read: str, expected: str = "") -> Callable[[Callable[[T], Iterable[Finding]]], Check[T]]:
    """Make a check of a function that yields findings: errors, warnings and notes, or nothing where all is fine."""
    return lambda look: Check(id, title, read, expected, look)


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
