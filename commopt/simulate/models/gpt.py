"""GPT-2 (Radford et al. 2019), with names and shapes as in Hugging Face's GPT2LMHeadModel."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.document import require_whole
from commopt.errors import ConfigurationError
from commopt.simulate.models.layers import attention_flops, norm
from commopt.simulate.models.parameters import Model, Parameter

_VOCABULARY = 50_257
_POSITIONS = 1024


def gpt2(sequence: int = 1024) -> Model:
    """Return the smallest, 12 layers of width 768: 124,439,808 parameters."""
    return _gpt2("gpt2", 12, 768, sequence)


def gpt2_medium(sequence: int = 1024) -> Model:
    """Return 24 layers of width 1024: 354,823,168 parameters."""
    return _gpt2("gpt2-medium", 24, 1024, sequence)


def _gpt2(name: str, layers: int, width: int, sequence: int) -> Model:
    """Return a model whose head's weight is the token embedding's, counted once.

    Attention counts as if each token looked at all others: half of it is masked, and only some kernels leave that out.
    """
    require_whole(sequence, 1, f"{name}: sequence")
    if sequence > _POSITIONS:
        raise ConfigurationError(f"{name}: sequence {sequence} is longer than its {_POSITIONS} positions; pass fewer")
    return Model(name, tuple(_parameters(layers, width, sequence)), f"sequence of {sequence} tokens")


def _parameters(layers: int, width: int, sequence: int) -> Iterator[Parameter]:
    yield Parameter("transformer.wte.weight", (_VOCABULARY, width))
    yield Parameter("transformer.wpe.weight", (_POSITIONS, width))
    attention = attention_flops(sequence, sequence, width)
    for number in range(layers):
        layer = f"transformer.h.{number}"
        yield from norm(f"{layer}.ln_1", width)
        yield from _projection(f"{layer}.attn.c_attn", width, 3 * width, sequence)
        yield from _projection(f"{layer}.attn.c_proj", width, width, sequence, attention)
        yield from norm(f"{layer}.ln_2", width)
        yield from _projection(f"{layer}.mlp.c_fc", width, 4 * width, sequence)
        yield from _projection(f"{layer}.mlp.c_proj", 4 * width, width, sequence)
    weight, bias = norm("transformer.ln_f", width)
    # The head has no parameter of its own. Its product is the first thing in backward, and this norm the next.
    yield Parameter(weight.name, weight.shape, 2 * _VOCABULARY * width * sequence)
    yield bias


def _projection(
    name: str, inputs: int, outputs: int, positions: int, more_flops: int = 0
) -> tuple[Parameter, Parameter]:
    """Return a linear map whose weight is stored as [inputs, outputs]."""
    weight = Parameter(f"{name}.weight", (inputs, outputs), 2 * inputs * outputs * positions + more_flops)
    return weight, Parameter(f"{name}.bias", (outputs,))
