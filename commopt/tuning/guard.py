"""Whether a compressed training still follows the gradients."""

from __future__ import annotations

from dataclasses import replace

from commopt.plan import Faithfulness

_LEAST_COSINE_SHARE = 0.5  # of what it was
_MOST_GROWTH = 4.0  # of what is kept for later, which stays bounded while error feedback works


class Guard:
    """Compares what is sampled with what it was when the present way of averaging was new."""

    def __init__(self) -> None:
        self._first: Faithfulness | None = None

    def astray(self, now: Faithfulness | None) -> str:
        """Say what got worse than it may, or nothing."""
        if now is None:
            return ""
        if self._first is None:
            self._first = now
            return ""
        if self._first.cosine is None:
            self._first = replace(self._first, cosine=now.cosine)
        then = self._first
        if now.cosine is not None and then.cosine is not None and now.cosine < _LEAST_COSINE_SHARE * then.cosine:
            return f"the cosine of updates to the dense mean fell from {then.cosine:.2f} to {now.cosine:.2f}"
        if now.residual_norm > _MOST_GROWTH * then.residual_norm > 0:
            return f"the residuals' norm grew from {then.residual_norm:.3g} to {now.residual_norm:.3g}"
        return ""
