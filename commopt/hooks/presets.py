# SPDX-License-Identifier: Apache-2.0
"""The names that users type. Each is a hook that torch's DDP accepts as it is, and a recipe for an aggregator."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import ast
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import update_wrapper
from inspect import Parameter, Signature
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import Aggregator, Auto, Compressed, Flat, Hierarchical, LocalSGD, Outer, PowerSGD
from commopt.attached.options import OPTIONS
from commopt.compress import COMPRESSORS, DGC, Cast, Compressor, OneBit, Quantize
from commopt.errors import ConfigurationError, did_you_mean
from commopt.hooks.state import HookState

Recipe = Callable[..., Aggregator]


class Preset:
    """A hook that torch's DDP accepts as it is, made from a function that builds its aggregator.

    Called with options, or with nothing, it returns that aggregator: `commopt.hierarchical_powersgd(matrix_rank=8)`.
    Pickled by name, so that a saved DDP model finds it again.
    """

    def __init__(self, recipe: Recipe) -> None:
        if not inspect.isfunction(recipe):
            raise ConfigurationError(
                f"Preset({recipe!r:.80}) is made from no function; pass one that builds an aggregator, or use "
                f"commopt.build_preset(name)"
            )
        # DDP reads a hook's __name__, __qualname__ and signature.
        update_wrapper(self, recipe)
        vars(self).pop("__wrapped__", None)
        self.name = recipe.__name__
        self._recipe: Recipe = recipe
        self._options = inspect.signature(recipe).parameters
        of_hook = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in ("state", "bucket")]
        options = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in self._options.values()]
        self.__signature__ = Signature([*of_hook, *options])

    @overload
    def __call__(self, state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]: ...
    @overload
    def __call__(self, **options: Any) -> Aggregator: ...
    def __call__(self, *call: Any, **options: Any) -> Any:
        """Average a bucket with this preset's aggregator, unless DDP's state says otherwise; or build the aggregator.

        Raises ConfigurationError for an option it does not have, or that has no name.
        """
        if not call and not options.keys() & {"state", "bucket"}:
            return self.build(**options)
        if len(call) + len(options) != 2:
            raise ConfigurationError(
                f"{self!r} got {', '.join(map(repr, call))}; it takes options by name only: {self._takes()}"
            )
        state, bucket = call if len(call) == 2 else (call[0] if call else options["state"], options["bucket"])
        if not isinstance(state, HookState) or not isinstance(bucket, dist.GradBucket):
            _refuse_call(state, bucket, repr(self))
        registration = state._registration
        if registration.decided_by != self.name:
            registration.decide(self.build(), self.name)
        return registration.reduce(bucket)

    def build(self, **options: Any) -> Aggregator:
        """Return the aggregator, with the preset's own options.

        Raises ConfigurationError for an option it does not have.
        """
        for name, value in options.items():
            if name in OPTIONS:
                raise ConfigurationError(
                    f"{name}={value!r} is no option of the preset {self.name} but of attach: pass it there, "
                    f"commopt.attach(ddp, {self!r}, {name}={value!r}), or to commopt run as "
                    f"--option {name}={value}"
                )
            if name not in self._options:
                raise ConfigurationError(
                    f"preset {self.name} has no option {name}={value!r}"
                    f"{did_you_mean(name, [*self._options, *OPTIONS]) or ';'} "
                    f"it takes {self._takes()}, and attach takes {', '.join(sorted(OPTIONS))} too"
                )
        return self._recipe(**options)

    def _takes(self) -> str:
        return ", ".join(self._options) or "none"

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"commopt.{self.name}"


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average `bucket` with the aggregator of `state`, Hierarchical() when it has none."""
    if not isinstance(state, HookState) or not isinstance(bucket, dist.GradBucket):
        _refuse_call(state, bucket, "commopt.hook")
    registration = state._registration
    if registration.aggregator is None:
        registration.decide(Hierarchical(), "hook")
    return registration.reduce(bucket)


def _refuse_call(state: object, bucket: object, name: str) -> None:
    if not isinstance(state, HookState):
        raise ConfigurationError(
            f"{name} was registered with state={state!r}; it needs a HookState: "
            f"ddp.register_comm_hook(commopt.HookState(), {name})"
        )
    raise ConfigurationError(
        f"{name} got a {type(bucket).__name__} instead of a GradBucket, as torch.compile's python reducer hands "
        f"over; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer' (or False)"
    )


# ----------------------------------------------------------------------------------------- by their names

PRESETS: dict[str, Preset] = {}
LOCAL_PRESETS: dict[str, Preset] = {}  # for whole models only: between their rounds nodes go their own ways


def build_preset(text: str, **options: Any) -> Aggregator:
    """Return the aggregator that "name" or "name:option=value:option=value" describes, as a command line can.

    A value is a literal, or a compressor or an Outer as they show themselves: compressor=Quantize(bits=4).
    Raises ConfigurationError that names the presets, or the preset's options, that are near.
    """
    from commopt.command_line import option_value

    if not isinstance(text, str):
        raise ConfigurationError(f"preset {text!r:.80} is no text; pass for example build_preset('hierarchical')")
    name, *settings = text.split(":")
    known = PRESETS | LOCAL_PRESETS
    if name not in known:
        meant = did_you_mean(name, known) or ";"
        raise ConfigurationError(f"preset {name!r} is unknown{meant} known presets: {', '.join(sorted(known))}")
    for setting in settings:
        option, equals, value = setting.partition("=")
        if not equals:
            raise ConfigurationError(f"{setting!r} in {text!r} is no option=value, for example {name}:block=256")
        typed = option_value(value)
        options[option] = _object(typed) if isinstance(typed, str) and typed.endswith(")") else typed
    return known[name].build(**options)


def _object(text: str) -> Any:
    """Return the compressor or Outer that is shown as `text`; raises ConfigurationError."""
    known: tuple[type[Any], ...] = (*COMPRESSORS.values(), PowerSGD, Outer)
    kinds = {each.__name__: each for each in known}
    try:
        shown: Any = ast.parse(text, mode="eval").body
        by_name = {each.arg: ast.literal_eval(each.value) for each in shown.keywords}
        return kinds[shown.func.id](*map(ast.literal_eval, shown.args), **by_name)
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        examples = "Quantize(bits=4) or PowerSGD(matrix_rank=8)"
        raise ConfigurationError(f"{text!r} is none of {', '.join(kinds)} with its options, as {examples}") from None


_MEMORY = (
    "Memory beside DDP's: at most `{}` bytes on each rank, with n elements of gradients, m of them in the largest "
    "bucket (in DDP's first step all), N nodes of L ranks and P ranks in all{}."
)
# In messages, 4 m bytes: the staged residual; a region in one piece, to encode it or as it is decoded; rows.
_SCRATCH = "12 * m"
_OF_RANKS = f"4 * n + (P > 2) * 4 * n / P + {_SCRATCH}"
_OF_NODES = f"4 * n / L + (N > 2) * 4 * n / P + {_SCRATCH}"
_OF_FACTORS = "; the factors are small"


def _preset(name: str, about: str, build: Callable[..., Aggregator], memory: str = "", also: str = "") -> Preset:
    """Make a preset of the function that builds its aggregator, whose signature has the options.

    memory: the formula, in Python. also: what is to be said of it.
    """
    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    first, *rest = about.split("\n\n", 1)
    build.__doc__ = "\n\n".join([first, *([_MEMORY.format(memory, also)] if memory else []), *rest])
    return PRESETS.setdefault(name, Preset(build))


def _preset_of(
    name: str,
    about: str,
    kind: type[Any],
    memory: str = "",
    also: str = "",
    *,
    between_nodes: bool = False,
    **defaults: Any,
) -> Preset:
    """Make a preset whose options are the fields of `kind`, an aggregator or a compressor, and of what is put around.

    A compressor goes into Compressed(...), and with `between_nodes` the whole into Hierarchical(...). about: says what
    it does, {} where. memory, also: as `_preset` has them. defaults: other ones than the fields have.
    """
    around: dict[type[Any], tuple[str, ...]] = {}
    if issubclass(kind, Compressor):
        around[Compressed] = ("feedback", "dense", "adam")
    if between_nodes:
        around[Hierarchical] = ()
    options = _options_of(kind)
    for outer, names in around.items():
        options += [option for option in _options_of(outer) if option.name in names]

    def build(**given: Any) -> Aggregator:
        given = defaults | given
        for_outer = {
            outer: {each: given.pop(each) for each in names if each in given} for outer, names in around.items()
        }
        made = kind(**given)
        for outer, own in for_outer.items():
            made = outer(made, **own)
        aggregator: Aggregator = made
        return aggregator

    shown = [each.replace(default=defaults.get(each.name, each.default)) for each in options]
    build.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    where = "between the nodes, exact inside them" if between_nodes else "between all ranks"
    docs = [f"{each.__name__}: {inspect.getdoc(each)}" for each in (kind, *around)]
    return _preset(name, "\n\n".join([about.format(where), "Options, by name:", *docs]), build, memory, also)


def _options_of(kind: type[Any]) -> list[Parameter]:
    """Return the parameters of a dataclass, each with a default that is a value."""
    factories = {each.name: each.default_factory for each in fields(kind) if each.default_factory is not MISSING}
    parameters = inspect.signature(kind, eval_str=True).parameters.values()
    return [
        each.replace(kind=Parameter.KEYWORD_ONLY, default=factories.get(each.name, lambda each=each: each.default)())
        for each in parameters
    ]


flat = _preset(
    "flat",
    "One all_reduce over all ranks, as in stock DDP; the ranks of a node are neighbours.",
    lambda: Flat(),
    "0",
)
hierarchical = _preset(
    "hierarchical",
    "Exact average; each of N nodes sends only 2 (N-1)/N of the gradient.",
    lambda: Hierarchical(),
    "8 * m",
)


def _bf16(*, rounding: Literal["nearest", "stochastic"] = "nearest", lossless: bool = False) -> Aggregator:
    if not isinstance(lossless, bool):
        raise ConfigurationError(f"hierarchical_bf16(lossless={lossless!r}) must be True or False")
    return Hierarchical(inter=Compressed(Cast(torch.bfloat16, rounding), feedback=None, packed=lossless))


hierarchical_bf16 = _preset(
    "hierarchical_bf16",
    "As hierarchical, with bfloat16 between the nodes and float32 sums: half the bytes on the slow network.\n\n"
    'rounding: "stochastic" rounds at random, so that the mean over steps is exact; see Cast.',
    _bf16,
    "8 * m",
    "; with lossless=True `12 * m`",
)

_BITS = "8, 4 or 2 bits per element {}, with error feedback."
_SIGNS = "Signs and a scale per block {}, with error feedback; advised after a dense start."
_FACTORS = "Low-rank factors of the gradients' matrices {}, with error feedback."
_LARGEST = "The largest elements {}, with error feedback. The residual is a momentum: give AdamW a short first moment."
# 4 KiB with bfloat16 values: on 10 Gb/s 3 us, less than a message takes that has nothing in it.
_FREE_ELEMENTS = 1024

_MASKED = "; 5 bytes more for each element that no rank has touched yet"
_WITH_ADAM = "; with adam= `12 * n / L + (N > 2) * 4 * n / P + 24 * m`"

quantized = _preset_of("quantized", _BITS, Quantize, _OF_RANKS, _MASKED)
onebit = _preset_of("onebit", _SIGNS, OneBit, _OF_RANKS, _MASKED)
powersgd = _preset_of("powersgd", _FACTORS, PowerSGD, f"4 * n + {_SCRATCH}", _OF_FACTORS)
dgc = _preset_of("dgc", _LARGEST, DGC, _OF_RANKS, min_elements=_FREE_ELEMENTS)
hierarchical_quantized = _preset_of(
    "hierarchical_quantized", _BITS, Quantize, _OF_NODES, _MASKED + _WITH_ADAM, between_nodes=True
)
hierarchical_onebit = _preset_of(
    "hierarchical_onebit", _SIGNS, OneBit, _OF_NODES, _MASKED + _WITH_ADAM, between_nodes=True
)
hierarchical_powersgd = _preset_of(
    "hierarchical_powersgd",
    _FACTORS,
    PowerSGD,
    f"4 * n / L + {_SCRATCH}",
    f", over gloo `4 * n + {_SCRATCH}`{_OF_FACTORS}",
    between_nodes=True,
)
hierarchical_dgc = _preset_of(
    "hierarchical_dgc", _LARGEST, DGC, _OF_NODES, _WITH_ADAM, between_nodes=True, min_elements=_FREE_ELEMENTS
)


def _local(name: str, about: str, memory: str, offloaded: str, **defaults: Any) -> Preset:
    """Make a preset whose options are those of LocalSGD. offloaded: the bytes on the device with offload=True."""
    also = "; in rounds m are the elements of the largest message of parameters (25 MiB, or one parameter)"
    also += f"; with offload=True `{offloaded}`, and the rest in host memory"
    preset = _preset_of(name, about, LocalSGD, memory, also, **defaults)
    LOCAL_PRESETS[name] = PRESETS.pop(name)
    return preset


diloco = _local(
    "diloco",
    "DiLoCo (Douillard et al., arXiv 2311.08105): float32 deltas every 500 steps, then Nesterov's, 0.9 at rate 0.7.",
    "4 * n + 8 * n / L + 16 * m",  # the parameters on their way, those agreed on, and the momentum
    "4 * n + 16 * m + 8 * m / L",  # copies of the latter two, of one message
    period=500,
    outer=Outer(lr=0.7, momentum=0.9, nesterov=True),
)
onebit_local = _local(
    "onebit_local",
    "Signs of deltas and a scale per block, with error feedback (arXiv 1901.09847, there of gradients), every 16 "
    "steps: for AdamW on the slowest links.",
    "4 * n + 8 * n / L + (N > 2) * 4 * n / P + 16 * m",
    "4 * n + 16 * m + 8 * m / L + (N > 2) * 4 * m / P",
    period=16,
    compressor=OneBit(),
)
auto = _preset_of("auto", "The allowed strategy that pays most: predicted, tried on live steps, and watched.", Auto)
