# SPDX-License-Identifier: Apache-2.0
"""The options of `attach` besides the strategy: a field for each, with its default, its check and its models.

A new option is a field here, a parameter in the signature of `attach`, and a row of docs/usage.md. The signatures that
help() shows, HookState, the states of FSDP2, pickles and `commopt run --option` follow from the field.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from datetime import timedelta
from inspect import Parameter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from commopt.attached.replay import replay_wanted
from commopt.document import require_whole
from commopt.errors import ConfigurationError
from commopt.groups import require_site
from commopt.groups.build import read_arguments, require_timeout
from commopt.kernels.loader import kernels_wanted
from commopt.schedule import Plan, Tuned
from commopt.schedule.config import read_links, read_plan, read_tuned

if TYPE_CHECKING:
    from commopt.cost import Links

ON_DIVERGENCE = ("warn", "raise", "resync")
CHECK_EVERY = 100  # steps: then a check costs less than a thousandth of them

ModelKind = Literal["ddp", "replicated", "sharded"]
"""DDP's model, or fully_shard's with replicas (a 2-D mesh, or replicate) or sharded over all ranks (a 1-D mesh)."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OF_DDP = "for DDP models only, and this one is of fully_shard"
_GROUPS = "FSDP's groups are those you gave to fully_shard, one message each"
_MESH = f"{_OF_DDP}: the mesh of fully_shard says which ranks are replicas"
_FOR_PLANS = f"{_OF_DDP}: it is for plans, and {_GROUPS}"
_NEIGHBOURS = f"{_OF_DDP}: ranks of one shard are not neighbours; set COMMOPT_RANKS_PER_NODE, which counts all ranks"
_OF_REPLICAS = "for models with replicas, and ranks of a 1-D mesh hold different shards"
_OF_SHARDS = "for models that are sharded over all ranks; with replicas no weights are sent between nodes"


def _rules(
    about: str,
    *,
    refused: Mapping[ModelKind, str] | None = None,
    fits_all: Any = None,
    portable: bool = True,
    compared: bool = False,
) -> dict[str, Any]:
    """Return the metadata of an option.

    about: its description, for help().
    refused: the models that do not take it, and why not.
    fits_all: a value that every model takes all the same.
    portable: whether a command line and a pickle can hold it; otherwise it is an object of this process.
    compared: whether ranks compare it when they join. (The setup of groups and of plans compares others by itself.)
    """
    rules = {"about": about, "refused": refused or {}, "fits_all": fits_all}
    return {**rules, "portable": portable, "compared": compared}


@dataclass(frozen=True)
class AttachOptions:
    """The options of `attach` besides the strategy, as they were given or, once `checked`, as they are kept."""

    process_group: Any = field(
        default=None,
        metadata=_rules(
            "the ranks to average over, a ProcessGroup or a one-dimensional DeviceMesh. Default: DDP's group; "
            "for a HookState the world, and torch's own DDP cannot check that.",
            refused={"replicated": _MESH, "sharded": _MESH},
            portable=False,
        ),
    )
    ranks_per_node: int | None = field(
        default=None,
        metadata=_rules(
            "declare blocks of so many ranks to be nodes (as COMMOPT_RANKS_PER_NODE does) instead of asking the hosts.",
            refused={"replicated": _NEIGHBOURS},
        ),
    )
    site: str | None = field(
        default=None,
        metadata=_rules(
            "where this rank's node is, in a network whose nodes are not all equally near: any text, levels outermost "
            'first as in "berlin/rack3". Default: COMMOPT_SITE, or the switches that Slurm names.',
            portable=False,
        ),
    )
    scaler: Any = field(
        default=None,
        metadata=_rules(
            "the torch.amp.GradScaler of the training loop. Aggregators with error feedback need it: residuals "
            "are kept unscaled, and a step that the scaler drops changes none of them.",
            portable=False,
        ),
    )
    timeout: float | timedelta | None = field(
        default=None,
        metadata=_rules(
            "seconds or timedelta that a collective, or a rank that never arrives, may take. Default: the "
            "process group's (600 s where torch does not tell).",
        ),
    )
    plan: Plan | str | Path | None = field(
        default=None,
        metadata=_rules(
            'which gradients travel together. "ddp", the default, leaves DDP\'s buckets alone, and follows no '
            'plan of a checkpoint; "adaptive", the default for "auto" and for "hierarchical..." over sites, measures '
            "and plans, starting from a checkpoint's plan if it has one; a Plan (or the path of a saved one) is "
            "followed. If ranks differ, all follow rank 0's. attach reads COMMOPT_PLAN where none is given.",
            refused={"replicated": f"{_OF_DDP}: {_GROUPS}", "sharded": f"{_OF_DDP}: {_GROUPS}"},
            fits_all="ddp",
        ),
    )
    links: Links | str | Path | None = field(
        default=None,
        metadata=_rules(
            "what messages cost, from `python -m commopt probe` (or the path of its file), the same on all "
            'ranks. Default: "adaptive" tries it out.',
            refused={"replicated": _FOR_PLANS, "sharded": _FOR_PLANS},
        ),
    )
    record: bool = field(
        default=False,
        metadata=_rules(
            "keep the times of all steps, for `timeline` and `report`; else only those that planning measures "
            "are kept. The same on all ranks.",
            compared=True,
        ),
    )
    tuned: Tuned | str | Path | None = field(
        default=None,
        metadata=_rules(
            'for "auto", the result of an earlier tuning (or the path of its file): begun with, and watched.',
            refused={"replicated": _FOR_PLANS, "sharded": _FOR_PLANS},
        ),
    )
    weights: Any = field(
        default=None,
        metadata=_rules(
            "for a model sharded over all ranks, how its weights travel: Weights(...). Default: exactly.",
            refused={"ddp": "for models of fully_shard, and this is one of DDP", "replicated": _OF_SHARDS},
            portable=False,
        ),
    )

    check_every: int = field(
        default=CHECK_EVERY,
        metadata=_rules(
            "after how many steps replicas are compared again, by checksums of 16 bytes a rank; 0 for never. The same "
            "on all ranks.",
            refused={"sharded": _OF_REPLICAS},
            fits_all=0,
            compared=True,
        ),
    )
    on_divergence: Literal["warn", "raise", "resync"] = field(
        default="warn",
        metadata=_rules(
            'what to do when parameters of replicas differ: "warn"; "raise" MismatchError on every rank; or "resync", '
            "which gives ranks that deviate the parameters and buffers of the others, and leaves each its state of "
            "the optimizer. The same on all ranks.",
            refused={"sharded": _OF_REPLICAS},
            compared=True,
        ),
    )

    def checked(self, model: ModelKind | None = None) -> AttachOptions:
        """Return the options as they are kept: the timeout in seconds, files read, no process group.

        model: which model they are for; None where that is not known yet. Raises ConfigurationError.
        """
        for each in fields(self):
            given, why = getattr(self, each.name), each.metadata["refused"].get(model)
            if why and given != each.default and given != each.metadata["fits_all"]:
                raise ConfigurationError(f"attach({each.name}={given!r}) is {why}; leave {each.name} out")
        require_scaler(self.scaler)
        ranks_per_node, timeout_s = read_arguments(self.ranks_per_node, self.timeout)
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ConfigurationError(f"ranks_per_node={ranks_per_node} is not 1 or more; pass the ranks of one node")
        if self.site is not None:
            require_site(self.site, "site")
        if timeout_s is not None:
            require_timeout(timeout_s)
        if not isinstance(self.record, bool):
            raise ConfigurationError(f"record={self.record!r} is neither True nor False; pass one of them")
        require_whole(self.check_every, 0, "check_every")
        if self.on_divergence not in ON_DIVERGENCE:
            raise ConfigurationError(
                f"on_divergence={self.on_divergence!r} is not known; pass one of {', '.join(map(repr, ON_DIVERGENCE))}"
            )
        replay_wanted()
        kernels_wanted()
        links, plan, tuned = read_links(self.links), read_plan(self.plan), read_tuned(self.tuned)
        if isinstance(plan, Plan) and tuned is not None:
            raise ConfigurationError("plan= and tuned= both say what to send; pass one of them")
        # Without the process group, which its user may destroy.
        return replace(self, plan=plan, links=links, tuned=tuned, timeout=timeout_s, process_group=None)

    def compared(self) -> dict[str, str]:
        """Return what ranks compare when they join."""
        return {each.name: str(getattr(self, each.name)) for each in fields(self) if each.metadata["compared"]}

    def portable(self) -> AttachOptions:
        """Return the options for a pickle: without the objects of this process."""
        return AttachOptions(**{name: getattr(self, name) for name in PORTABLE_OPTIONS})


OPTIONS = tuple(each.name for each in fields(AttachOptions))
PORTABLE_OPTIONS = tuple(each.name for each in fields(AttachOptions) if each.metadata["portable"])


def require_scaler(scaler: Any) -> None:
    """Raise ConfigurationError for what is neither a GradScaler nor None."""
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ConfigurationError(f"scaler is a {type(scaler).__name__}; pass the torch.amp.GradScaler or None")


def shows_options(*models: ModelKind, rest: str = "") -> Callable[[_Function], _Function]:
    """Let help() show each option that one of `models` takes, in the place of a function's **options.

    rest: the name of what the function takes besides.
    """
    takes = [each for each in fields(AttachOptions) if not {*models} <= each.metadata["refused"].keys()]
    abouts = [fill(f"{each.name}: {each.metadata['about']}", 116, subsequent_indent="    ") for each in takes]

    def show(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, options = signature.parameters.values()
        known = {each.name for each in own}
        own += [_parameter(each) for each in takes if each.name not in known]
        own += [options.replace(name=rest)] if rest else []
        vars(function)["__signature__"] = signature.replace(parameters=own)
        function.__doc__ = "\n".join([inspect.getdoc(function) or "Options:", "", *abouts])
        return function

    return show


def _parameter(option: Field[Any]) -> Parameter:
    return Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
