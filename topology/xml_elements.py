# SPDX-License-Identifier: Apache-2.0
"""A small XML tree with line numbers, parsed from untrusted text, and the values of its attributes.

All sizes are bounded: no DOCTYPE (so no entities), limits on size, depth and number of elements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from topology.model import PciLink, TopologyError, shown

# NCCL itself stops at some thousand elements; the largest machines need about 1,000 and 100 kB.
MAX_CHARACTERS = 4 << 20
MAX_ELEMENTS = 20_000
MAX_DEPTH = 32

_DECLARATION = re.compile(r"\s*<\?xml\b[^<>]{0,200}\?>")


@dataclass
class Element:
    """One tag with its attributes, its line in the file (from 1) and its children."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)


def parse_elements(data: str | bytes, source: str) -> Element:
    """Return the root element of `data`; `source` is its name in messages.

    Raises TopologyError with the line number unless it is well-formed, bounded XML.
    """
    head = data[:MAX_CHARACTERS]
    text = head if isinstance(head, str) else _decode(head)
    builder = _Builder(source)
    # NCCL allows comments that XML forbids: with -- inside, or in front of the declaration.
    builder.run(_without_declaration(_without_comments(text)), complete=len(data) <= MAX_CHARACTERS)
    assert builder.root is not None
    return builder.root


def _decode(data: bytes) -> str:
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    return data.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")


def _without_comments(text: str) -> str:
    """Replace comments by their line ends, which keeps line numbers."""
    kept = []
    position = 0
    while (start := text.find("<!--", position)) >= 0 and (end := text.find("-->", start + 4)) >= 0:
        kept += [text[position:start], "\n" * text.count("\n", start, end)]
        position = end + 3
    return "".join([*kept, text[position:]])


def _without_declaration(text: str) -> str:
    match = _DECLARATION.match(text)
    return text if match is None else "\n" * match[0].count("\n") + text[match.end() :]


class _Builder:
    """Builds a tree from expat's events, and raises helpful errors."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.root: Element | None = None
        self.open: list[Element] = []
        self.count = 0
        self.parser = expat.ParserCreate("utf-8")
        self.parser.StartDoctypeDeclHandler = self.doctype
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end

    def run(self, text: str, complete: bool) -> None:
        try:
            self.parser.Parse(text.encode("utf-8", errors="replace"), complete)
        except expat.ExpatError as error:
            raise self.refusal(error) from None
        if not complete:
            raise self.error(f"is longer than {MAX_CHARACTERS} characters; a topology file has about 100,000 at most")

    def doctype(self, name: str, system_id: str | None, public_id: str | None, has_subset: bool) -> None:
        if name == "topology":
            raise self.error(
                "root element is <topology>, not <system>: an hwloc file; give NCCL's own (NCCL_TOPO_DUMP_FILE=...)"
            )
        raise self.error(f"DOCTYPE {shown(name)} is refused, NCCL's files have none; take it out")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.count += 1
        if self.count > MAX_ELEMENTS:
            raise self.error(f"more than {MAX_ELEMENTS} elements; no machine's topology has that many")
        if len(self.open) == MAX_DEPTH:
            raise self.error(f"<{shown(tag)[1:-1]}> is nested more than {MAX_DEPTH} deep; no machine's PCI tree is")
        element = Element(tag, attributes, self.parser.CurrentLineNumber)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def end(self, tag: str) -> None:
        self.open.pop()

    def error(self, problem: str, line: int | None = None) -> TopologyError:
        return TopologyError(f"{self.source}:{line or self.parser.CurrentLineNumber}: {problem}")

    def refusal(self, error: expat.ExpatError) -> TopologyError:
        message = expat.errors.messages.get(error.code, "not well-formed")
        at_end = message in (expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_UNCLOSED_TOKEN)
        if at_end and self.open:
            inside = self.open[-1]
            return self.error(
                f"not well-formed: the file ends inside <{shown(inside.tag)[1:-1]}> of line {inside.line}; "
                "it was cut off, copy or dump it again",
                error.lineno,
            )
        if at_end:
            return self.error("no XML element found; give a topology file as NCCL writes it", error.lineno)
        return self.error(f"XML error in column {error.offset + 1}: {message}; mend the line", error.lineno)


_INTEGER = re.compile(r"([+-]?)(?:0x([0-9a-f]{1,16})|([0-9]{1,20}))", re.ASCII | re.IGNORECASE)
_DECIMALS = re.compile(r"\.[0-9]{1,20}", re.ASCII)
_GTS = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) ?GT/s\b.*", re.ASCII)
_AFFINITY = re.compile(r"[0-9a-f]{1,8}(?:,[0-9a-f]{1,8}){0,511}", re.ASCII | re.IGNORECASE)

KNOWN_GTS = (2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0)
MAX_WIDTH = 32
_NOTES_KEPT = 40


class Notes:
    """A reader's remarks about its input, a sentence each; beyond forty only their number."""

    def __init__(self) -> None:
        self._kept: dict[str, None] = {}

    def add(self, sentence: str, line: int | None = None) -> None:
        """Add `sentence` once, preceded by its line in the file, if given."""
        self._kept[sentence if line is None else f"line {line}: {sentence}"] = None

    def sentences(self) -> tuple[str, ...]:
        """Return the remarks."""
        first, more = [*self._kept][:_NOTES_KEPT], len(self._kept) - _NOTES_KEPT
        return (*first, *([f"and {more} more remarks of these kinds"] if more > 0 else []))


class Attributes:
    """Typed access to the attributes of one element."""

    def __init__(self, element: Element, notes: Notes) -> None:
        self._element = element
        self._notes = notes

    def text(self, key: str) -> str | None:
        """Return the trimmed text."""
        return self._element.attributes.get(key, "").strip() or None

    def integer(self, key: str, lowest: int | None = None, highest: int = 2**64 - 1) -> int | None:
        """Return a decimal or 0x number as in NCCL, which drops decimals."""
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
        """Return link_speed ("16.0 GT/s PCIe") and link_width; a width of 0 is unknown."""
        width = self.integer("link_width", 0, 255) or None
        # Registers of virtual devices hold 255 or 63.
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
