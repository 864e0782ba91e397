"""Layers that models are built of, as the parameters they bring.

Normalization, activations, pooling and look-ups count as no FLOPs: memory bounds them, and the share of its peak that a
GPU is said to reach has them in it. Norms and biases are ready with the layer they belong to or the one before.
"""

from __future__ import annotations

from commopt.simulate.models.parameters import Parameter


def convolution(
    name: str, inputs: int, outputs: int, kernel: int, pixels: int, *, bias: bool = False
) -> tuple[Parameter, ...]:
    """Return a square convolution with `pixels` x `pixels` outputs in each of `outputs` channels."""
    weight = (outputs, inputs, kernel, kernel)
    parameters = (Parameter(f"{name}.weight", weight, 2 * outputs * inputs * kernel**2 * pixels**2),)
    return (*parameters, Parameter(f"{name}.bias", (outputs,))) if bias else parameters


def linear(
    name: str, inputs: int, outputs: int, positions: int = 1, *, bias: bool = True, more_flops: int = 0
) -> tuple[Parameter, ...]:
    """Return a linear map of each of `positions` vectors; more_flops: of what has no parameter, done just before."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), 2 * outputs * inputs * positions + more_flops)
    return (weight, Parameter(f"{name}.bias", (outputs,))) if bias else (weight,)


def norm(name: str, width: int) -> tuple[Parameter, ...]:
    """Return the scale and the shift of a normalization."""
    return (Parameter(f"{name}.weight", (width,)), Parameter(f"{name}.bias", (width,)))


def attention_flops(tokens: int, seen: int, width: int) -> int:
    """Return the FLOPs of scores and weighted values: each of `tokens` looks at `seen` others, in all heads together.

    They belong to no parameter. Models count them at the weight of the output projection, which comes next; in backward
    that weight is therefore taken to be ready a little later than it is.
    """
    return 2 * 2 * tokens * seen * width
