# SPDX-License-Identifier: Apache-2.0
"""A repr that shows the first field of a configuration and omits later ones that have their default."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any


class ConciseRepr:
    """Base of frozen dataclasses (made with repr=False) whose repr leaves out later fields with default values."""

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value, default = getattr(self, field.name), _default(field)
            if default is MISSING:
                shown.append(repr(value))
            elif not shown or value != default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
