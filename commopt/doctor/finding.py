"""What a check reports: one thing that was looked at, what it is, what it should be, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Literal

Confidence = Literal["high", "medium", "low"]


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


@dataclass(frozen=True)
class Check:
    """A check's id and name, and short ways to say what it found."""

    id: str
    title: str

    def error(self, read: str, value: str, expected: str, remedy: str, confidence: Confidence = "high") -> Finding:
        """Broken, or several times slower than it could be."""
        return Finding(self.id, self.title, Severity.ERROR, read, value, expected, remedy, confidence)

    def warning(self, read: str, value: str, expected: str, remedy: str, confidence: Confidence = "high") -> Finding:
        """Probably costs speed, or will break in a likely situation."""
        return Finding(self.id, self.title, Severity.WARNING, read, value, expected, remedy, confidence)

    def info(
        self, read: str, value: str, expected: str, remedy: str | None = None, confidence: Confidence = "high"
    ) -> Finding:
        """Worth knowing."""
        return Finding(self.id, self.title, Severity.INFO, read, value, expected, remedy, confidence)

    def ok(self, read: str, value: str, expected: str) -> Finding:
        """As it should be, or not needed here."""
        return Finding(self.id, self.title, Severity.OK, read, value, expected)

    def unread(self, read: str, why: str, remedy: str | None = None) -> Finding:
        """Could not be looked at: never passed over in silence."""
        return Finding(self.id, self.title, Severity.INFO, read, None, why, remedy, "low")


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity; within one severity keep the order of the checks, which is the order of repair."""
    return sorted(findings, key=lambda finding: finding.severity.rank)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """Say once what several machines reported in the same words, with the names of all of them."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        named = nodes.setdefault(replace(finding, nodes=()), [])
        named += [node for node in finding.nodes if node not in named]
    return [replace(finding, nodes=tuple(named)) for finding, named in nodes.items()]


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 3 when there is an error, 1 when there is a warning, else 0."""
    worst = min((finding.severity.rank for finding in findings), default=Severity.OK.rank)
    return {Severity.ERROR.rank: 3, Severity.WARNING.rank: 1}.get(worst, 0)
