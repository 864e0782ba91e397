# SPDX-License-Identifier: Apache-2.0
"""All errors that users may see, one class per kind of mistake, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return "; did you mean NAME?" with the similar names among `known`; "" if there is none."""
    near = get_close_matches(str(name), map(str, known), cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class CommoptError(RuntimeError):
    """Base class of all commopt errors."""


class ConfigurationError(CommoptError, ValueError):
    """An invalid argument, or a combination of options that cannot work."""


class UnsupportedTensorError(CommoptError, TypeError):
    """A tensor or array with a dtype, layout or memory that no aggregator supports."""


class MismatchError(CommoptError):
    """Ranks disagree about a value they must share, or one of them did not arrive."""


class LaneError(CommoptError):
    """Communication failed on some rank. The lane accepts no further work.

    Raised by backward, by every call and by `Work.wait`. Through torch's futures (`Work.get_future`, DDP's join()) it
    arrives as a RuntimeError; `commopt.failure_of(error)` returns the LaneError behind it.
    """


class TransportError(CommoptError):
    """A collective, a store or a connection failed, usually because of an error on another rank."""
