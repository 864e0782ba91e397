"""What mkdocs is told beyond mkdocs.yml: the API reference by commopt.__all__, and no link that leads nowhere."""

from __future__ import annotations

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
    "hooks": "Attach, states, presets",
    "sharded": "Attach, states, presets",
    "integrations": "Frameworks",
    "aggregate": "Aggregators",
    "compress": "Compressors",
    "feedback": "Error feedback",
    "collectives": "Without DDP",
    "groups": "Process groups",
    "schedule": "Plans, recordings, prices",
    "timeline": "Plans, recordings, prices",
    "cost": "Plans, recordings, prices",
    "errors": "Errors",
    "lanes": "Errors",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write the reference where docs/api.md has its mark."""
    if page.file.src_uri != "api.md":
        return markdown
    import commopt

    sections: dict[str, list[str]] = {title: [] for title in [*GROUPS.values(), "Constants"]}
    for name in sorted(commopt.__all__, key=lambda name: (name.lower(), name)):
        sections[_group(getattr(commopt, name))].append(_entry(name))
    text = "\n\n".join(f"## {title}\n\n" + "\n\n".join(found) for title, found in sections.items() if found)
    return re.sub(r"<!-- api: .* -->", lambda _: text, markdown)


def _group(value: object) -> str:
    package = (getattr(value, "__module__", None) or "").split(".")
    return GROUPS[package[1]] if package[0] == "commopt" else "Constants"


def _entry(name: str) -> str:
    import commopt
    from examples import reference

    value = getattr(commopt, name)
    entry = f"::: commopt.{name}"
    if isinstance(value, commopt.Preset):  # made when it is imported, so nothing to be read in the source
        options = inspect.signature(value).parameters.values()
        takes = ", ".join(str(each) for each in options if each.name not in ("state", "bucket"))
        signature = f"```python\n{name}({takes})\n```"
        entry = f"### `{name}` {{#commopt.{name}}}\n\n{signature}\n\n{as_list(inspect.getdoc(value) or '')}"
    elif isinstance(value, dict | str):
        entry = f"### `{name}` {{#commopt.{name}}}"
    example = inspect.getsource(reference.examples()[name]).partition(":\n")[2]
    return f"{entry}\n\n**Example**\n\n```python\n{textwrap.dedent(example)}```"


def as_list(docstring: str) -> str:
    """Return a docstring whose lines `name: what it is` are a list."""
    listed = re.sub(r"^(\w+): (?=\S)", r"- `\1`: ", docstring, flags=re.M)
    listed = re.sub(r"(?<=\n)([^-\s].*\n)(?=- `)", r"\1\n", listed)  # a list begins after an empty line
    return re.sub(r"^((?:- `| {4}).*\n)(?=[^-\s])", r"\1\n", listed, flags=re.M)  # and ends before one


class Parameters(griffe.Extension):
    """Does the same to all docstrings that mkdocstrings reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change it before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = as_list(inspect.cleandoc(obj.docstring.value))


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
    """Raise unless every link of the site leads to a file and an anchor there is, and nothing is loaded from elsewhere."""
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
            elif not target.is_relative_to(site.resolve()) or not target.exists() or (
                parts.fragment and unquote(parts.fragment) not in pages[target].ids
            ):
                wrong.append(f"{path.relative_to(site)} leads to {link}")
    if wrong:
        raise SystemExit("\n".join(["links that lead nowhere:", *sorted(set(wrong))]))
