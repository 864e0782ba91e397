"""Whose turn it is to average: the hook's, or, where nothing pays, DDP's by itself."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.bucketing import reducer
from commopt.bucketing.absence import Absence


class Turns:
    """Takes the hook away, and puts it back, between the same two steps on every rank.

    hand_over: lets DDP average by itself from the next backward on, if it can be told to, and returns a parameter that
    gets a gradient in every step then; else None.
    """

    def __init__(self, hand_over: Callable[[TorchDDP], Tensor | None]) -> None:
        self._hand_over = hand_over
        self._ddp: ref[TorchDDP] | None = None
        self._sees_forwards = False  # not those of torch.compile(ddp)
        self._absence: Absence | None = None
        self._steps_away = 0
        self._leaving: tuple[int, object] | None = None  # for how many steps, and what joins were like then

    def serve(self, ddp: TorchDDP) -> None:
        """Take note of the model."""
        self._ddp = ref(ddp)

    @property
    def is_away(self) -> bool:
        """Whether DDP averages by itself now, without the hook."""
        return self._absence is not None

    def steps_away(self, *, alike: bool = False) -> int:
        """Return how many steps DDP has averaged by itself that nobody has fetched; alike: as all ranks count them."""
        ddp, absence = self._model(), self._absence
        if absence is None or (alike and (ddp is None or not absence.is_alike(ddp))):
            return self._steps_away
        return self._steps_away + absence.steps

    def fetch_steps_away(self) -> int:
        """Return, once, how many steps DDP has averaged by itself before the hook came back."""
        steps, self._steps_away = self._steps_away, 0
        return steps

    # ------------------------------------------------------------------------------------- changing

    def leave(self, steps: int) -> None:
        """Let DDP average by itself, in the buckets it has, for so many steps from a forward before the next step on.

        If it can, and not from within a join(): a rank without data makes no forward there.
        """
        ddp = self._model()
        self._leaving = (steps, ddp._join_config) if ddp is not None and self._sees_forwards and steps > 0 else None

    def freeze(self) -> None:
        """Let everything be averaged as it is now; all ranks must between the same two steps."""
        self._leaving = None
        ddp, absence = self._model(), self._absence
        if ddp is None or absence is None:
            return
        # Some ranks may have seen a forward since the step in which this began or was to end, and others not.
        if absence.steps == 0 or absence.is_over(ddp):
            self.come_back()
        else:
            absence.last()

    def come_back(self) -> None:
        """Let the hook average from the next backward on; all ranks must between the same two steps."""
        self._leaving = None
        ddp, absence = self._model(), self._absence
        if ddp is not None and absence is not None:
            reducer.put_hook(ddp)
            absence.end()
            self._steps_away += absence.steps
            self._absence = None

    # ------------------------------------------------------------------------------------- every forward

    def before_forward(self) -> None:
        """Change over if it is time; only between a step and a forward can that be."""
        self._sees_forwards = True
        ddp, absence = self._model(), self._absence
        if ddp is None:
            return
        if absence is not None and absence.is_over(ddp) and not reducer.is_capturing():
            self.come_back()
        if self._leaving is not None:
            steps, join_config = self._leaving
            parameter = self._hand_over(ddp) if ddp._join_config is join_config else None
            if parameter is not None:
                self._absence = Absence(ddp, parameter, steps)
                self._leaving = None

    def after_forward(self) -> None:
        """Count, while DDP averages by itself."""
        ddp = self._model()
        if ddp is not None and self._absence is not None:
            self._absence.after_forward(ddp)

    def _model(self) -> TorchDDP | None:
        return None if self._ddp is None else self._ddp()
