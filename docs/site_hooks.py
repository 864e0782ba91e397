# SPDX-License-Identifier: Apache-2.0
"""What mkdocs is told beyond mkdocs.yml: the reference by commopt.__all__, all messages, no link that leads nowhere."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# Headings of the reference, by the package that a name comes from.
GROUPS = {
    "attached": "Attach, states, presets",
    "checkpoint_files": "Attach, states, presets",
    "hooks": "Attach, states, presets",
    "sharded": "Attach, states, presets",
    "server": "Attach, states, presets",
    "aggregate": "Aggregators",
    "compress": "Compressors",
    "feedback": "Error feedback",
    "collectives": "Without DDP",
    "groups": "Process groups",
    "launcher": "Process groups",
    "schedule": "Plans, recordings, prices",
    "timeline": "Plans, recordings, prices",
    "cost": "Plans, recordings, prices",
    "errors": "Errors",
    "lanes": "Errors",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the reference and the messages where pages have their marks."""
    written = {"api": reference, "messages": message_tables}
    return re.sub(r"<!-- (api|messages): .* -->", lambda mark: written[mark[1]](), markdown)


# ------------------------------------------------------------------------------------------- reference


def reference() -> str:
    """Return the reference in Markdown."""
    import commopt

    sections: dict[str, list[str]] = {title: [] for title in [*GROUPS.values(), "Constants"]}
    for name in sorted(commopt.__all__, key=lambda name: (name.lower(), name)):
        sections[_group(getattr(commopt, name))].append(_entry(name))
    for path in sorted((ROOT / "commopt" / "integrations").glob("[a-z]*.py")):  # examples: docs/frameworks.md
        sections.setdefault("Frameworks", []).append(f"::: commopt.integrations.{path.stem}")
    return "\n\n".join(f"## {title}\n\n" + "\n\n".join(found) for title, found in sections.items() if found)


def _group(value: object) -> str:
    package = (getattr(value, "__module__", None) or "").split(".")
    return GROUPS[package[1]] if package[0] == "commopt" else "Constants"


def _entry(name: str) -> str:
    import commopt
    from examples.reference import examples

    value, entry = getattr(commopt, name), f"::: commopt.{name}"
    heading = f"### commopt.{name} {{#commopt.{name} data-toc-label='{name}'}}"
    if isinstance(value, commopt.Preset):  # made when it is imported, so nothing to be read in the source
        options = list(inspect.signature(value).parameters.values())[2:]
        takes = "".join(f"    {each.replace(kind=each.KEYWORD_ONLY)},\n" for each in options)
        signature = f"```python\n{name}({takes and chr(10)}{takes})\n```"
        entry = f"{heading}\n\n{signature}\n\n{as_list(inspect.getdoc(value) or '')}"
    elif isinstance(value, dict | str):
        entry = heading
    example = inspect.getsource(examples()[name]).partition(":\n")[2]
    return f"{entry}\n\n**Example**\n\n```python\n{textwrap.dedent(example)}```"


def as_list(docstring: str) -> str:
    """Return a docstring whose lines `name: what it is` are a list."""
    listed = re.sub(r"^(\w+): (?=\S)", r"- `\1`: ", docstring, flags=re.M)
    return re.sub(r"(?<=\n)([^-\s].*\n)(?=- `)", r"\1\n", listed)  # which begins after an empty line


class Parameters(griffe.Extension):  # type: ignore[misc]
    """Does the same to all docstrings that mkdocstrings reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change it before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(inspect.cleandoc(obj.docstring.value))


# ------------------------------------------------------------------------------------------- messages


def messages() -> dict[str, set[tuple[str, str]]]:
    """Return what may be raised or logged: by package, the name of the exception or "warning", and the text.

    `…` stands for what is put in.
    """
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted([*(ROOT / "commopt").rglob("*.py"), *(ROOT / "topology").rglob("*.py")]):
        package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:2])
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", getattr(called, "attr", ""))
            if isinstance(node, ast.Call) and (name.endswith(("Error", "warning")) or name == "warn") and node.args:
                text = text_of(node.args[0])
                if len(text.replace("…", "").strip()) > 8:
                    found.setdefault(package, set()).add((name if name.endswith("Error") else "warning", text))
    return found


def text_of(node: ast.AST) -> str:
    """Return a string of the source, with … for what is put in."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%(\.\d)?[rsdf]", "…", str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) else "…"


def message_tables() -> str:
    """Return a table for each package; the text before the last `;` is what is wrong, what follows what to do."""
    lines = []
    for package, found in messages().items():
        lines += ["", f"**{package}**", "", "| | message | fix |", "|---|---|---|"]
        for name, text in sorted(found, key=lambda each: each[::-1]):
            wrong, semicolon, fix = text.replace("\n", " ").replace("|", "\\|").rpartition("; ")
            lines.append(f"| {name} | {_plain(wrong if semicolon else fix)} | {_plain(fix) if semicolon else ''} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    return re.sub(r"([*_`<\[])", r"\\\1", text)


# ------------------------------------------------------------------------------------------- links


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := found.get(key))}
        for key in ("href", "src"):
            if value := found.get(key):
                (self.links if tag == "a" else self.loads).append(value)


def on_post_build(config: Any, **_: Any) -> None:
    """End the build if a link of the site leads to no file or anchor, or something is loaded from elsewhere."""
    site = Path(config["site_dir"])
    pages = {path: _Page() for path in site.rglob("*.html")}
    for path, page in pages.items():
        page.feed(path.read_text())
    wrong = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append(f"{path.relative_to(site)} loads {link}")
            elif path.name == "404.html":  # its links are of the place it is served at
                continue
            elif (
                not target.is_relative_to(site.resolve())
                or not target.exists()
                or (parts.fragment and unquote(parts.fragment) not in pages[target].ids)
            ):
                wrong.append(f"{path.relative_to(site)} leads to {link}")
    if wrong:
        raise SystemExit("\n".join(["links that lead nowhere:", *sorted(set(wrong))]))
