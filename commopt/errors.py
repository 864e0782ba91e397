# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet, one class per kind of mistake; and what was meant by a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return "; did you mean NAME?" with those of `known` that look like `name`, "" where none does."""
    near = get_close_matches(str(name), map(str, known), cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


class CommoptError(RuntimeError):
    """Base of all commopt errors."""


class ConfigurationError(CommoptError, ValueError):
    """An argument or a combination of settings that cannot work."""


class UnsupportedTensorError(CommoptError, TypeError):
    """A tensor or array whose dtype, layout or memory no aggregator can handle."""


class MismatchError(CommoptError):
    """Ranks disagree about something they must share, or one of them never arrived."""


class LaneError(CommoptError):
    """A communication operation failed on some rank; the lane takes no further work.

    Raised by backward, by every call and by `Work.wait`. What goes through a future of torch (`Work.get_future`, DDP's
    join()) is a RuntimeError instead: `commopt.failure_of(error)` returns the LaneError behind it.
    """


class TransportError(CommoptError):
    """A collective failed underneath us: usually the echo of an error on another rank."""
