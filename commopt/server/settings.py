# SPDX-License-Identifier: Apache-2.0
"""The options that all workers of a parameter server share, as an object and as text that can be compared."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from commopt.aggregate import Outer
from commopt.compress import COMPRESSORS, Compressor
from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError

if TYPE_CHECKING:
    from commopt.server.worker import Worker

ADDRESS_VARIABLE = "COMMOPT_SCHEDULER"


@dataclass(frozen=True, repr=False)
class ParameterServer(ConciseRepr):
    """Asynchronous training: each worker trains on its own and exchanges updates with a server every `period` steps.

    Slow or dead workers do not stop the others. `commopt.attach(model, ParameterServer("host:port"))` joins. The model
    is a plain module of one process, or a DDP model, whose ranks are one worker. Each worker has its own optimizer. A
    worker m that pulled theta of round r and now has the parameters theta_m sends the delta

        a_m = decay e_m + theta_r - theta_m;  e_m = a_m - D(C(a_m))

    with C the compressor and D its decoding. The server closes a round when it has enough deltas, and sets

        theta = outer(theta, sum_m w_m D(C(a_m)) / sum_m w_m)

    with w_m the work that worker m reports (`Worker.did`), by default its steps. A late delta counts in the next round.
    A delta that is too late is refused, and its worker keeps all of it in e_m.

    address: host:port of the scheduler; None: the value of COMMOPT_SCHEDULER, which `commopt worker` sets.
    period: optimizer steps between two exchanges.
    compressor: compressor of deltas, and of the server's updates. None: float32 without compression.
    outer: the optimizer of theta.
    decay: the share of e_m that is kept, in (0, 1].
    quorum: number of deltas with which a round closes once the waiting time for the others is over. A round with the
        deltas of all workers closes at once. None: always wait for all, so the slowest worker sets the pace.
    staleness: a delta counts if at most this many rounds have closed since its worker pulled. A worker that is k times
        slower than the others needs k.
    grace: the waiting time of a round is the median of past arrival times plus `grace` times their median absolute
        deviation.
    """

    address: str | None = None
    period: int = 16
    compressor: Compressor | None = None
    outer: Outer = field(default_factory=Outer)
    decay: float = 1.0
    quorum: int | None = None
    staleness: int = 4
    grace: float = 3.0

    def __post_init__(self) -> None:
        for name, least in (("period", 1), ("quorum", 1), ("staleness", 0)):
            value = getattr(self, name)
            if name == "quorum" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                self._refuse(name, f"must be a whole number, {least} or more")
        for name, most in (("decay", 1.0), ("grace", 1000.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= most:
                self._refuse(name, f"must be above 0 and at most {most:g}")
        if not isinstance(self.outer, Outer):
            self._refuse("outer", "must be a commopt.Outer, for example Outer(lr=0.7, momentum=0.9)")
        if self.compressor is not None and not isinstance(self.compressor, Compressor):
            self._refuse("compressor", "must be a compressor, for example OneBit(), or None")
        if self.address is not None and not isinstance(self.address, str):
            self._refuse("address", "must be text such as 'node0:29400', or None")

    def _refuse(self, name: str, rule: str) -> None:
        raise ConfigurationError(f"ParameterServer({name}={getattr(self, name)!r}) {rule}")

    def attach(self, model: nn.Module) -> Worker:
        """Join with a model, whose parameters become the server's; see `commopt.attach`."""
        from commopt.server.worker import Worker

        return Worker(self, model)

    # ------------------------------------------------------------------------------------- as text

    def as_text(self) -> dict[str, str]:
        """Return the options that must be equal on all workers, each as Python code, for `read`."""
        return {each.name: repr(getattr(self, each.name)) for each in fields(self) if each.name != "address"}

    @classmethod
    def read(cls, text: Mapping[str, str]) -> ParameterServer:
        """Return the object of `as_text`. Raises ConfigurationError for a compressor not in COMPRESSORS here."""
        return cls(**{name: _value_of(ast.parse(code, mode="eval").body) for name, code in text.items()})


_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}


def _value_of(node: ast.AST) -> Any:
    """Evaluate the repr of an option: literals, dtypes, and objects of known classes. No other code is run."""
    if isinstance(node, ast.Tuple):
        return tuple(map(_value_of, node.elts))
    if isinstance(node, ast.Attribute):
        return _DTYPES[ast.unparse(node)]
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    known: dict[str, Any] = {"Outer": Outer, **{kind.__name__: kind for kind in COMPRESSORS.values()}}
    name = ast.unparse(node.func)
    if name not in known:
        raise ConfigurationError(
            f"the server knows no {name}; import the module that adds it to commopt.COMPRESSORS there"
        )
    return known[name](*map(_value_of, node.args), **{str(each.arg): _value_of(each.value) for each in node.keywords})
