"""What to do after a window in which too few steps could be measured."""

from __future__ import annotations

from commopt.plan.calendar import Calendar, Decision
from commopt.plan.window import Window

_LARGEST_STEPS = 800


class Patience:
    """Measures again, each time twice as many steps later, until a window has `least_steps` of `window_steps`."""

    def __init__(self, window_steps: int, least_steps: int) -> None:
        self._window_steps, self._least_steps = window_steps, least_steps
        self._distance = window_steps

    def wait(self, window: Window, step: int) -> Decision | None:
        """Return when to measure again after `step`; None where the window will do."""
        if len(window.step_us) >= self._least_steps:
            self._distance = self._window_steps
            return None
        meet_at = step + self._distance
        self._distance = min(2 * self._distance, _LARGEST_STEPS)
        reason = f"{len(window.step_us)} steps could be measured, fewer than {self._least_steps}; measuring again"
        return Decision(None, Calendar(meet_at - self._window_steps + 1, meet_at), reason)
