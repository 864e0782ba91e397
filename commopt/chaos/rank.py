# SPDX-License-Identifier: Apache-2.0
"""One rank of a run: the script as under `commopt run`, with a journal, and with the fault on the rank it strikes."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from math import isfinite
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commopt.chaos.faults import CLOCK_JUMP_S, FAULTS
from commopt.chaos.journal import Event, Journal
from commopt.lanes import failure_of
from commopt.lanes.registry import lanes
from commopt.run.models import Models, watching
from commopt.run.script import Choice, Script

SERVER = "parameter_server"  # the strategy whose options are those of ParameterServer
EVERY = 5  # steps between the moments of a fault
_SAMPLE_S = 0.1
_STRUCK_WITHIN_S = 60.0
_DISK = "64k"


@dataclass(frozen=True)
class RunOrder:
    """What the ranks of one run are told.

    folder: where journals are written. settings: "option=value" of attach. fault: "" for none. at: the step, from 1.
    victim: the rank that the fault strikes; the number after the last one is the parameter server's.
    timeout_s: of the parameter server, for silence.
    """

    folder: str
    script: str
    arguments: tuple[str, ...]
    strategy: str
    settings: tuple[str, ...] = ()
    fault: str = ""
    victim: int = 0
    at: int = 10
    environment: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 15.0

    def told(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return asdict(self)

    @classmethod
    def heard(cls, told: dict[str, Any]) -> RunOrder:
        """Return what `told` was of."""
        return cls(**told | {"arguments": tuple(told["arguments"]), "settings": tuple(told["settings"])})

    @property
    def has_server(self) -> bool:
        """Whether the ranks are workers of a parameter server, each node one."""
        return self.strategy.partition(":")[0] == SERVER

    @property
    def moments(self) -> list[int]:
        """The steps in which the fault strikes."""
        return [self.at + EVERY * number for number in range(FAULTS[self.fault].moments)] if self.fault else []


class Observer(Models):
    """Attaches the strategy, notes the steps of the first model that is trained, and lets the fault strike."""

    def __init__(
        self, order: RunOrder, journal: Journal, strike: Callable[[int, Tensor], Tensor | None] | None
    ) -> None:
        choice = Choice(order.strategy) if order.has_server else Choice.read(order.strategy, order.settings)
        super().__init__(choice)
        self.journal, self._strike, self._moments = journal, strike, order.moments
        self._fault = order.fault
        self._model: ReferenceType[nn.Module] | None = None
        self._parameters: list[Tensor] = []  # they outlive the script's model
        self._step = 0
        self._loss: float | None = None
        self._finite = self._any_finite = True

    def before_forward(self, model: nn.Module) -> None:
        """Attach, if it is time for it; note the step that is over."""
        self.attach_to(model)
        if self._model is None and self.trained:
            self._model, self._parameters = ref(model), list(model.parameters())
            register_optimizer_step_pre_hook(self._look_at_gradients)
        if self._model is not None and self._model() is model and torch.is_grad_enabled():
            self.note_step()
            self._step += 1
            if self._strike is not None and self._step in self._moments:
                self._arm(model, partial(self._strike, self._moments.index(self._step)))

    def attach_to(self, model: nn.Module) -> None:
        """Attach the strategy to a model, unless that was done; `trained` has a line for it then."""
        super().before_forward(model)

    def places(self) -> list[Any]:
        """Return where in communication this process is, from another thread; it waits while it stays there."""
        return [place for lane in lanes() if (place := lane.under_way()) is not None]

    def note_step(self) -> None:
        """Note the step before this moment, if there was any."""
        if self._step == 0:
            return
        state = self._states[0]() if self._states else None
        norm = None if state is None or not state.membership.alive else state.stats().get("residual_norm")
        told: Event = {"loss": self._loss if self._loss is not None and isfinite(self._loss) else None}
        norm = repr(norm) if norm is not None and not isfinite(norm) else norm
        told |= {"finite": self._finite, "any_finite": self._any_finite}
        self.journal.write("step", step=self._step, residual=norm, **told)
        self._finite = self._any_finite = True
        self._loss = None

    def digest(self) -> str:
        """Return a hash of the parameters that this rank holds."""
        return digest_of(each.to_local() if isinstance(each, DTensor) else each for each in self._parameters)

    @contextmanager
    def watching_losses(self) -> Iterator[None]:
        """Note the losses of which `backward` is called."""
        backward: Any = Tensor.backward

        @wraps(backward)
        def watched(loss: Tensor, *arguments: Any, **options: Any) -> Any:
            if loss.numel() == 1:
                self._loss = float(loss.detach())
            return backward(loss, *arguments, **options)

        Tensor.backward = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward = backward  # type: ignore[method-assign]

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        finite = [bool(each.isfinite().all()) for each in local if each.numel()]
        self._finite, self._any_finite = all(finite), any(finite)

    def _arm(self, model: nn.Module, strike: Callable[[Tensor], Tensor | None]) -> None:
        """Let `strike` have the gradient of the layer in the middle: those behind it have theirs already by then.

        A NaN comes from the last layer, so that all gradients are NaN, and all residuals have to stay what they are.
        """
        layers = [each for each in model.modules() if not list(each.children()) and list(each.parameters())]

        def catch(layer: nn.Module, inputs: Any, output: Any) -> None:
            handle.remove()
            first = output if isinstance(output, Tensor) else next(each for each in output if isinstance(each, Tensor))
            first.register_hook(strike)

        place = -1 if self._fault == "nan" else len(layers) // 2
        handle = layers[place].register_forward_hook(catch)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of tensors."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# ------------------------------------------------------------------------------------------- faults


class Striker:
    """Does what a fault does inside a process, or waits until it was done from outside. files: where it saves."""

    def __init__(self, order: RunOrder, journal: Journal, files: Path) -> None:
        self._fault, self._folder, self._journal, self._files = order.fault, Path(order.folder), journal, files

    def __call__(self, number: int, gradient: Tensor) -> Tensor | None:
        """Strike for the number-th time; return what takes the place of the gradient, None where it stays."""
        self._journal.write("strike", number=number)
        inside: Any = getattr(self, f"_{self._fault}", None)
        if inside is not None:
            changed: Tensor | None = inside(number, gradient)
            return changed
        deadline = time.monotonic() + _STRUCK_WITHIN_S
        while not (self._folder / f"struck{number}").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return None

    def _nan(self, number: int, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("nan"))

    def _oom(self, number: int, gradient: Tensor) -> None:
        torch.empty(2**50, dtype=torch.uint8, device=gradient.device)  # more than any machine has

    def _diskfull(self, number: int, gradient: Tensor) -> None:
        """Save to a disk that is full; flight records go there, too."""
        self.shrink_disk()
        with (self._files / "checkpoint.pt").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def shrink_disk(self) -> None:
        """Put a small disk where files are saved. It is this node's alone, and gone with it."""
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "commopt-chaos", str(self._files)]
        subprocess.run(command, check=True, capture_output=True)

    def _clock(self, number: int, gradient: Tensor) -> None:
        """Set the clock that Python's programs ask; the machine's own is not touched."""
        if number:
            time.time, time.time_ns = _TIME, _TIME_NS
        else:
            time.time = lambda: _TIME() + CLOCK_JUMP_S
            time.time_ns = lambda: _TIME_NS() + int(CLOCK_JUMP_S * 1e9)


_TIME, _TIME_NS = time.time, time.time_ns


# --------------------------------------------------------------------------------------- the process


def train(order: RunOrder, rank: int, kind: type[Observer] = Observer) -> None:
    """Run the script in this process; what ends it goes into the journal and passes through.

    kind: attaches the strategy.
    """
    faulthandler.enable()  # a rank that aborts leaves the stacks of its threads in its log
    folder = Path(order.folder)
    flights = folder / f"flights{rank}"
    flights.mkdir()
    os.environ["COMMOPT_FLIGHT"] = str(flights)
    journal = Journal(folder / f"rank{rank}.jsonl")
    journal.write("begin", pid=os.getpid())
    strikes = order.fault and order.victim == rank
    observer = kind(order, journal, Striker(order, journal, flights) if strikes else None)
    sample(journal, observer.places)
    try:
        with watching(observer), observer.watching_losses():
            made = Script(order.script, order.arguments).run()
            observer.note_step()
            observer.average()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            observer.average()
            journal.write("end", digest=observer.digest())
            return
        noticed_s, named = time.monotonic(), failure_of(error)
        text = f"{type(error).__name__}: {error}"
        journal.write("end", noticed_s, error=text, named=None if named is None else str(named))
        raise
    journal.write("end", digest=observer.digest())
    del made


def sample(journal: Journal, places: Callable[[], list[Any]]) -> None:
    """Note in a thread what this process does, ten times a second; a gap means that it does not run.

    places: returns where it is, if in communication.
    """

    def run() -> None:
        before: list[Any] = []
        while True:
            now = places()
            waits = any(place in before for place in now)
            journal.write("sample", doing="waiting" if waits else "training")
            before = now
            time.sleep(_SAMPLE_S)

    threading.Thread(target=run, name="chaos-journal", daemon=True).start()
