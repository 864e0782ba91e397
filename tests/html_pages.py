# SPDX-License-Identifier: Apache-2.0
"""A page as tests read it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree


class Page:
    """Its texts and attributes; it is XML as well, so that every element must end where it should."""

    def __init__(self, file: Path) -> None:
        text = file.read_text()
        assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=", text), "it would ask the network"
        elements = list(ElementTree.fromstring(text).iter())
        self.texts = [text.strip() for element in elements for text in (element.text, element.tail) if text]
        self.attributes = [pair for element in elements for pair in element.items()]
