# SPDX-License-Identifier: Apache-2.0
"""Checks between backward and the optimizer's step: each average gets one step, and directions are not changed."""

from __future__ import annotations

import logging
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from commopt.attached.checks import before_each_step, require_plain_groups
from commopt.attached.reduction import loss_scale_of
from commopt.attached.steps import after_steps, update_mark
from commopt.errors import ConfigurationError
from commopt.feedback import Transaction

_log = logging.getLogger("commopt")

_PARAMETERS = 8  # of a model, whose gradients are looked at
_ELEMENTS = 1024  # of each of them
_STRICT_STEPS = 8  # at first: an error costs a user nothing yet
_READ_EVERY = 64  # steps, later, on a device for which the host would wait
_SHRUNK = 0.99  # beyond what a rounding to bfloat16 can do to a sum


class StepsBetweenAverages:
    """Checks, when a model's gradients are averaged again, whether an optimizer has stepped since the last time.

    Any step of a torch optimizer counts. So does an update() of the GradScaler, which may drop the step, and an average
    that was not finite. Loops in which no optimizer has been seen yet are left alone: they update parameters by hand.
    """

    def __init__(self) -> None:
        self._known = self._waiting = False
        self._mark: object = None
        after_steps.show(self, StepsBetweenAverages._note_step)

    def _note_step(self, _: torch.optim.Optimizer) -> None:
        self._known = True
        self._waiting = False

    def expect(self) -> None:
        """Take note of an optimizer that has not stepped yet."""
        self._known = True

    def forget(self) -> None:
        """Expect no step for what was averaged so far: training goes on from a checkpoint."""
        self._waiting = False

    def averaged(self, scaler: Any) -> None:
        """Note that a backward was averaged."""
        self._waiting = True
        self._mark = update_mark(scaler)

    def missed(self, scaler: Any, transaction: Transaction) -> bool:
        """Return whether no step has followed the last averaged backward; asked when the next one begins.

        transaction: of the residuals; averages that it found not finite no step has to follow.
        """
        if not (self._known and self._waiting) or update_mark(scaler) is not self._mark:
            return False
        finite = transaction.finite
        return finite is None or bool(finite)


class Directions:
    """Looks, before each step of an optimizer behind `adam=`, at what it is about to do with directions of Adam's.

    Its options: another Adam or momentum, which a scheduler may turn on in any step, would be applied a second time.
    The directions: those of some parameters must be as long as they were delivered. `clip_grad_norm_(..., 1.0)` cuts
    them to a hundredth or less, and training all but stops. That is an error in the first steps, where clipping by a
    usual limit shows. Later it is a warning, since a long training should not end by one step. On a GPU later steps are
    judged there, and the host reads the verdicts now and then.
    """

    def __init__(self, registration: Any) -> None:
        self._registration = ref(registration)
        self._delivered: list[tuple[Tensor, Tensor]] = []
        self._steps = 0
        self._told = self._closed = False
        self._least: Tensor | None = None  # share of what was delivered, over the steps that were not looked at yet
        before_each_step(registration, self._look)

    def close(self) -> None:
        """Look at no optimizer any more, though the registration may be kept for long, as by the frames of an error."""
        self._closed = True
        self.forget()

    def forget(self) -> None:
        """Compare nothing with what was delivered so far."""
        self._delivered = []

    @torch.no_grad()
    def delivered(self) -> None:
        """Remember what a backward has put into .grad."""
        registration = self._registration()
        if registration is None:
            return
        trained = [each for each in registration.parameters.values() if each.requires_grad]
        chosen = trained[:: -(-len(trained) // _PARAMETERS)] if trained else []
        found = [(each, _magnitude(each)) for each in chosen]
        self._delivered = [(parameter, magnitude) for parameter, magnitude in found if magnitude is not None]

    @torch.no_grad()
    def _look(self, registration: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._closed:
            return
        require_plain_groups(optimizer)
        if torch.compiler.is_compiling():
            return
        pairs = [(now, was) for each, was in self._delivered if (now := _magnitude(each)) is not None]
        self._steps += 1
        if self._told or not pairs:
            return
        now, was = (torch.stack(each).sum() for each in zip(*pairs, strict=True))
        share = now / was
        scale = None if registration.scaler is None else loss_scale_of(registration.scaler, share.device)
        if scale is not None:  # an optimizer that divides by the scale by itself sees directions as they were
            share = torch.maximum(share, share * scale)
        share = torch.where(share > 0, share, 1.0)  # zeros, and what is not finite, tell nothing
        self._least = share if self._least is None else torch.minimum(self._least, share)
        if share.device.type == "cpu" or self._steps <= _STRICT_STEPS or self._steps % _READ_EVERY == 0:
            least, self._least = float(self._least), None
            if least < _SHRUNK:
                self._tell(least)

    def _tell(self, share: float) -> None:
        said = (
            f"between backward and the optimizer's step .grad shrank to {share:.3g} of what was delivered, as by "
            f"clip_grad_norm_. With adam= it holds Adam's directions, whose length says nothing of the gradient's: "
            f"leave clipping out (Transformers: max_grad_norm=0, Lightning: gradient_clip_val=None, nanoGPT: "
            f"grad_clip=0), and for DDP let commopt.Adam(clip_norm=...) clip gradients before they enter the moments"
        )
        if self._steps <= _STRICT_STEPS:
            raise ConfigurationError(said)
        self._told = True
        _log.warning("%s", said)


def _magnitude(parameter: Tensor) -> Tensor | None:
    """Return the sum of magnitudes of some elements of its .grad: float32, 0-d; None where it has none here."""
    grad = parameter.grad
    if grad is None:
        return None
    values: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    if not values.numel() or values.layout != torch.strided:
        return None
    flat = values.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _ELEMENTS)].abs().sum(dtype=torch.float32)
