"""Steps in which DDP averages by itself, without a hook: where nothing pays, nothing should cost anything either."""

from __future__ import annotations

from math import inf

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class Absence:
    """Counts the steps that no hook sees, until it is to come back: after `length` of them.

    A backward is such a step if a forward came before that DDP was prepared in, and ends that: as its reducer has it,
    so all ranks count alike. parameter: one that gets a gradient in every such backward.
    """

    def __init__(self, ddp: TorchDDP, parameter: Tensor, length: int) -> None:
        self.steps = 0
        self._length: float = length
        self._expects = False
        self._join_config = ddp._join_config
        self._handle = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)

    def after_forward(self, ddp: TorchDDP) -> None:
        """Note whether DDP is prepared for a backward that averages, as it is when a forward ends."""
        self._expects |= ddp.require_backward_grad_sync

    def _gradient_is_there(self, parameter: Tensor) -> None:
        self.steps += self._expects
        self._expects = False

    def is_alike(self, ddp: TorchDDP) -> bool:
        """Return whether all ranks have counted the same; never again after a join(), where some make no steps."""
        return ddp._join_config is self._join_config

    def is_over(self, ddp: TorchDDP) -> bool:
        """Return whether the hook is to come back, alike on all ranks."""
        return self.steps >= self._length and self.is_alike(ddp)

    def last(self) -> None:
        """Let it not be over by itself."""
        self._length = inf

    def end(self) -> None:
        """Count no more."""
        self._handle.remove()
