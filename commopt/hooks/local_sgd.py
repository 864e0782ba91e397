# SPDX-License-Identifier: Apache-2.0
"""Average a model's parameters over all ranks every few steps, before the forward that would read them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, LocalSGD
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Layout
from commopt.groups import Team, WireBytes
from commopt.lanes import LaneClient
from commopt.schedule import reducer

_log = logging.getLogger("commopt")

MESSAGE_NBYTES = 25 * 2**20  # what DDP gives its buckets


class ParameterAverages:
    """The parameters of one DDP model that a LocalSGD averages, and what that has sent.

    parameters: those whose gradients DDP averages. client: this rank among the others, None before it has joined them.
    steps: how many are complete; whoever counts them tells. A forward of `module` with gradients averages first what is
    due; an evaluation under no_grad() does not: one rank may evaluate alone.
    """

    def __init__(self, average: LocalSGD, module: nn.Module | None, parameters: Iterable[Tensor]) -> None:
        self.sent = WireBytes()
        self.times = 0
        self.steps = 0
        self.client: LaneClient | None = None
        self._average = average
        self._module = None if module is None else ref(module)
        # Chosen once: what is frozen later has become different on the nodes all the same.
        self._parameters = tuple(parameters)
        self._averaged_at = -1
        if module is not None:
            finalize(self, module.register_forward_pre_hook(_BeforeForward(self)).remove).atexit = False

    def take_turn(self) -> None:
        """Average if that is due and not done; all ranks must ask before the next step.

        Returns when the parameters are there (on CUDA: for the current stream). Raises ConfigurationError when the
        model is not known, or a CUDA graph is captured that would repeat what is not due.
        """
        if self._module is None:
            raise ConfigurationError(
                f"{self._average} averages parameters and does not know the model; use commopt.attach(ddp, ...), or "
                f"HookState(aggregator, module=ddp.module)"
            )
        if self.client is None or self._averaged_at == self.steps or not self._average.averages_after(self.steps):
            return
        if reducer.is_capturing():
            self._average.check_capture(self.steps, self.client.team)
        self._averaged_at = self.steps
        self.run(self.client)

    def begin_anew(self, steps: int) -> None:
        """Go on after `steps` steps, and forget which average was made last: the parameters are a checkpoint's now."""
        self.steps, self._averaged_at = steps, -1

    def run(self, client: LaneClient) -> None:
        """Average now, whatever is due and without changing it; collective. Returns as `take_turn` does."""
        if client.team.node_count == 1:
            return
        aggregator, handles = self._average.parameters, []
        for message in _messages(self._tensors()):
            work = partial(message.average, aggregator, client.team)
            handles.append(client.run(work, "average of the parameters", message.device))
            layout = Layout.anonymous(message.numel)
            self.sent += aggregator.wire_bytes(layout, message.dtype, client.team, message.device, 0)
        for handle in handles:
            handle.wait()
        self.times += 1

    def _tensors(self) -> list[Tensor]:
        module = None if self._module is None else self._module()
        if module is None or not self._average.buffers:
            return list(self._parameters)
        # By the names that DDP goes by for buffers. Asked each time: a module may put other tensors in their place.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        buffers = [b for name, b in module.named_buffers() if b.is_floating_point() and name not in ignored]
        return [*self._parameters, *buffers]


def warn_of_broadcasts(aggregator: Aggregator, ddp: TorchDDP) -> None:
    """Say it when DDP will send buffers between the nodes in every forward."""
    if isinstance(aggregator, LocalSGD) and ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
        _log.warning(
            "DDP broadcasts this model's buffers from rank 0 in every forward, between nodes too; use "
            "DistributedDataParallel(..., broadcast_buffers=False) and LocalSGD(buffers=True)"
        )


@dataclass(frozen=True)
class _Message:
    """Tensors of one device that travel together, as `dtype`."""

    tensors: tuple[Tensor, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    def average(self, aggregator: Aggregator, team: Team) -> None:
        """Average the values, on the lane; those of one tensor where they are, if that can be."""
        tensors = [tensor.detach() for tensor in self.tensors]
        alone = len(tensors) == 1 and tensors[0].dtype == self.dtype and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if alone else torch.cat([each.reshape(-1).to(self.dtype) for each in tensors])
        # Over all ranks though those of a node agree: in DDP's join() they may not, and inside a node it is cheap.
        aggregator.all_reduce(flat, team, 1.0 / team.size, BufferContext.unremembered(self.numel))
        if not alone:
            for tensor, value in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
                tensor.copy_(value.view(tensor.shape))


def _messages(tensors: Iterable[Tensor]) -> list[_Message]:
    """Cut up what is to be averaged, alike on all ranks: one device and dtype each, no longer than a bucket.

    16-bit tensors travel as float32, rounded once: gradients stand rounding in every sum better than weights do.
    """
    messages: list[_Message] = []
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((torch.promote_types(tensor.dtype, torch.float32), tensor.device), []).append(tensor)
    for (dtype, device), alike in kinds.items():
        nbytes, part = 0, list[Tensor]()
        for tensor in alike:
            nbytes += tensor.numel() * dtype.itemsize
            if part and nbytes > MESSAGE_NBYTES:
                messages.append(_Message(tuple(part), dtype, device))
                nbytes, part = tensor.numel() * dtype.itemsize, []
            part.append(tensor)
        messages.append(_Message(tuple(part), dtype, device))
    return messages


class _BeforeForward:
    """A forward pre-hook of the module DDP wraps; a copy of it, in a copied or saved model, does nothing.

    Unlike the DDP model's it is called under torch.compile, and in any form of registration.
    """

    def __init__(self, averages: ParameterAverages) -> None:
        found = ref(averages)

        def call_if_alive() -> None:
            alive = found()
            if alive is not None:
                alive.take_turn()

        # Traced, it would be compiled anew whenever a counter in it changes.
        self._call: Callable[[], None] | None = torch.compiler.disable(call_if_alive)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._call is not None and torch.is_grad_enabled():
            self._call()

    def __getstate__(self) -> dict[str, Any]:
        return {"_call": None}
