"""GPT-2, the smallest (Radford et al. 2019), with names and shapes as in Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.errors import ConfigurationError
from commopt.plan.document import require_whole
from commopt.simulate.models.layers import attention_flops, norm
from commopt.simulate.models.parameters import Model, Parameter

_VOCABULARY = 50_257
_POSITIONS = 1024
_LAYERS = 12
_WIDTH = 768


def gpt2(sequence: int = 1024) -> Model:
    """Return the model of 124,439,808 parameters; the head's weight is the token embedding's, counted once.

    Attention counts as if each token looked at all others: half of it is masked, and only some kernels leave that out.
    """
    require_whole(sequence, 1, "gpt2: sequence")
    if sequence > _POSITIONS:
        raise ConfigurationError(f"gpt2: sequence {sequence} is longer than its {_POSITIONS} positions; pass fewer")
    return Model("gpt2", tuple(_parameters(sequence)), f"sequence of {sequence} tokens")


def _parameters(sequence: int) -> Iterator[Parameter]:
    yield Parameter("transformer.wte.weight", (_VOCABULARY, _WIDTH))
    yield Parameter("transformer.wpe.weight", (_POSITIONS, _WIDTH))
    attention = attention_flops(sequence, sequence, _WIDTH)
    for number in range(_LAYERS):
        layer = f"transformer.h.{number}"
        yield from norm(f"{layer}.ln_1", _WIDTH)
        yield from _projection(f"{layer}.attn.c_attn", _WIDTH, 3 * _WIDTH, sequence)
        yield from _projection(f"{layer}.attn.c_proj", _WIDTH, _WIDTH, sequence, attention)
        yield from norm(f"{layer}.ln_2", _WIDTH)
        yield from _projection(f"{layer}.mlp.c_fc", _WIDTH, 4 * _WIDTH, sequence)
        yield from _projection(f"{layer}.mlp.c_proj", 4 * _WIDTH, _WIDTH, sequence)
    weight, bias = norm("transformer.ln_f", _WIDTH)
    # The head has no parameter of its own. Its product is the first thing in backward, and this norm the next.
    yield Parameter(weight.name, weight.shape, 2 * _VOCABULARY * _WIDTH * sequence)
    yield bias


def _projection(
    name: str, inputs: int, outputs: int, positions: int, more_flops: int = 0
) -> tuple[Parameter, Parameter]:
    """Return a linear map whose weight is stored as [inputs, outputs]."""
    weight = Parameter(f"{name}.weight", (inputs, outputs), 2 * inputs * outputs * positions + more_flops)
    return weight, Parameter(f"{name}.bias", (outputs,))
