"""Values of XML attributes: what is missing or empty is None, what cannot be meant is None and a note."""

from __future__ import annotations

import re

from topology.errors import shown
from topology.model import PciLink
from topology.nccl_xml.elements import Element

_INTEGER = re.compile(r"([+-]?)(?:0x([0-9a-f]{1,16})|([0-9]{1,20}))", re.ASCII | re.IGNORECASE)
_DECIMALS = re.compile(r"\.[0-9]{1,20}", re.ASCII)
_GTS = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) ?GT/s\b.*", re.ASCII)
_AFFINITY = re.compile(r"[0-9a-f]{1,8}(?:,[0-9a-f]{1,8}){0,511}", re.ASCII | re.IGNORECASE)

KNOWN_GTS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0)
MAX_WIDTH = 32
_NOTES_KEPT = 40


class Notes:
    """What a reader has to say about its input, a sentence each; past forty only their number."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._more = 0

    def add(self, sentence: str, line: int | None = None) -> None:
        """Keep `sentence` once, with the line of the file in front where there is one."""
        note = sentence if line is None else f"line {line}: {sentence}"
        if note in self._kept:
            return
        if len(self._kept) < _NOTES_KEPT:
            self._kept.append(note)
        else:
            self._more += 1

    def sentences(self) -> tuple[str, ...]:
        """Return all that was kept."""
        return (*self._kept, *([f"and {self._more} more remarks of these kinds"] if self._more else []))


class Attributes:
    """The attributes of one element, by the type they should have."""

    def __init__(self, element: Element, notes: Notes) -> None:
        self._element = element
        self._notes = notes

    def text(self, key: str) -> str | None:
        """Return the trimmed text."""
        return self._element.attributes.get(key, "").strip() or None

    def integer(self, key: str, lowest: int | None = None, highest: int = 2**64 - 1) -> int | None:
        """Return a decimal or 0x number as NCCL reads one: decimals after the point are dropped."""
        text = self.text(key)
        if text is None:
            return None
        match = _INTEGER.match(text)
        if match is None or (match.end() < len(text) and not _DECIMALS.fullmatch(text, match.end())):
            self._note(key, text, "is not a number")
            return None
        sign, hexadecimal, decimal = match.groups()
        value = (int(hexadecimal, 16) if hexadecimal else int(decimal)) * (-1 if sign == "-" else 1)
        if value > highest or (lowest is not None and value < lowest):
            self._note(key, text, "is not possible")
            return None
        return value

    def flag(self, key: str) -> bool | None:
        """Return 0 or 1 as a bool."""
        value = self.integer(key, 0, 1)
        return None if value is None else bool(value)

    def link(self) -> PciLink:
        """Return link_speed ("16.0 GT/s PCIe") and link_width; 0 lanes are unknown lanes."""
        width = self.integer("link_width", 0, 255) or None
        # 255 and 63 are what registers of virtual devices hold.
        return PciLink(self._gts(), width if width is None or width <= MAX_WIDTH else None)

    def _gts(self) -> float | None:
        text = self.text("link_speed")
        if text is None or text.lower().startswith("unknown"):
            return None
        match = _GTS.fullmatch(text)
        if match is None or float(match[1]) not in KNOWN_GTS:
            self._note("link_speed", text, "is no PCIe speed")
            return None
        return float(match[1])

    def affinity(self) -> tuple[int, ...] | None:
        """Return the CPU numbers of a mask: words of 32 bits in hexadecimal, the highest first.

        `affinity_offset` is the number of the mask's lowest bit.
        """
        text = self.text("affinity")
        if text is None:
            return None
        if not _AFFINITY.fullmatch(text):
            self._note("affinity", text, "is no CPU mask")
            return None
        offset = self.integer("affinity_offset", 0, 1 << 20) or 0
        mask = int("".join(f"{word:0>8}" for word in text.split(",")), 16)
        return tuple(number + offset for number, bit in enumerate(f"{mask:b}"[::-1]) if bit == "1")

    def _note(self, key: str, text: str, why: str) -> None:
        self._notes.add(f"<{self._element.tag}> {key}={shown(text)} {why}; taken as unknown", self._element.line)
