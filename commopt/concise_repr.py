# SPDX-License-Identifier: Apache-2.0
"""Base class of all configurations: a short repr, and a helpful error for an unknown option."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from commopt.errors import ConfigurationError, did_you_mean

_T = TypeVar("_T")


class ConciseRepr:
    """Base of frozen dataclasses (with repr=False) whose repr leaves out later fields with default values.

    Raises ConfigurationError for an unknown option.
    """

    def __new__(cls: type[_T], *values: Any, **options: Any) -> _T:
        """Check the names of the options before the dataclass does."""
        known = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                meant = did_you_mean(name, known)
                raise ConfigurationError(
                    f"{cls.__name__} has no option {name}={options[name]!r}{meant or ';'} it takes "
                    f"{', '.join(known) or 'none'}"
                )
        return object.__new__(cls)

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
