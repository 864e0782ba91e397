"""One spelling for PCI bus ids, whichever tool wrote them."""

from __future__ import annotations

import re

_BUSID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-9a-f]))?", re.ASCII)


def normalise_busid(text: str) -> str | None:
    """Return "dddd:bb:dd.f" in lower case, or None where `text` is no bus id.

    NVML's eight digits of domain become four where they fit ("00000000:0F:00.0"), lspci's missing domain is 0000, and
    a missing function is 0. Domains that need more digits keep them ("fffffff:ff:ff.0").
    """
    match = _BUSID.fullmatch(text.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{bus:0>2}:{device:0>2}.{function or '0'}"
