# SPDX-License-Identifier: Apache-2.0
"""Models by their published shapes: what a simulation knows of their parameters, and what their layers compute.

Normalization, activations, pooling and look-ups count as no FLOPs: memory bounds them, and the share of its peak that a
GPU is said to reach has them in it. A new model is one generator and one line in MODELS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

from commopt.document import require_text, require_time, require_whole
from commopt.errors import ConfigurationError, did_you_mean


@dataclass(frozen=True)
class Parameter:
    """One parameter; `forward_flops`: of its layer in forward for one sample, a multiply-add being two.

    A layer's FLOPs are counted at its weight; its other parameters have 0.
    """

    name: str
    shape: tuple[int, ...]
    forward_flops: float = 0

    def __post_init__(self) -> None:
        require_text(self.name, "parameter: name")
        for extent in self.shape:
            require_whole(extent, 1, f"parameter {self.name!r}: an extent of its shape")
        require_time(self.forward_flops, f"parameter {self.name!r}: forward_flops")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def layer(self) -> str:
        """Name of the module it belongs to; its own where it belongs to none."""
        return self.name.rpartition(".")[0] or self.name


@dataclass(frozen=True)
class Model:
    """Parameters in the order in which forward uses them, tied ones once, where they are used first.

    A tied weight is listed there because its gradient is complete only when backward has come to its first use. sample:
    what the FLOPs are counted for, as text.
    """

    name: str
    parameters: tuple[Parameter, ...]
    sample: str

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of one sample's forward."""
        return sum(parameter.forward_flops for parameter in self.parameters)

    @cached_property
    def convolutional(self) -> bool:
        """Whether most FLOPs are those of convolutions, whose weights have four extents."""
        inside = sum(parameter.forward_flops for parameter in self.parameters if len(parameter.shape) == 4)
        return inside > self.forward_flops / 2


# ------------------------------------------------------------------------------------------------- layers


def _convolution(
    name: str, inputs: int, outputs: int, kernel: int, pixels: int, *, bias: bool = False
) -> Iterator[Parameter]:
    """Yield a square convolution with `pixels` x `pixels` outputs in each of `outputs` channels."""
    weight = (outputs, inputs, kernel, kernel)
    yield Parameter(f"{name}.weight", weight, 2 * prod(weight) * pixels**2)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def _linear(
    name: str,
    inputs: int,
    outputs: int,
    positions: int = 1,
    *,
    bias: bool = True,
    more_flops: int = 0,
    inputs_first: bool = False,
) -> Iterator[Parameter]:
    """Yield a linear map of each of `positions` vectors; more_flops: of what has no parameter, done just before."""
    weight = (inputs, outputs) if inputs_first else (outputs, inputs)
    yield Parameter(f"{name}.weight", weight, 2 * outputs * inputs * positions + more_flops)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


def _norm(name: str, width: int, flops: int = 0) -> Iterator[Parameter]:
    """Yield the scale and the shift of a normalization."""
    yield Parameter(f"{name}.weight", (width,), flops)
    yield Parameter(f"{name}.bias", (width,))


def attention_flops(tokens: int, seen: int, width: int) -> int:
    """Return the FLOPs of scores and weighted values: each of `tokens` looks at `seen` others, in all heads together.

    They belong to no parameter. Models count them at the weight of the output projection, which comes next; in backward
    that weight is therefore taken to be ready a little later than it is.
    """
    return 2 * 2 * tokens * seen * width


# ------------------------------------------------------------------------------------------------- models

_PIXELS, _CLASSES = 224, 1000


def resnet50_parameters(pixels: int = _PIXELS) -> Iterator[Parameter]:
    """Yield ResNet-50 (He et al., arXiv 1512.03385), 25,557,032 parameters, for images of `pixels` x `pixels`.

    The stride is in the 3x3 convolutions, names are torchvision's.
    """
    channels = 64
    pixels = _strided(pixels, 2)
    yield from _convolution("conv1", 3, channels, 7, pixels)
    yield from _norm("bn1", channels)
    pixels = _strided(pixels, 2)  # max pooling
    stages = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride
    for stage, (width, blocks, first_stride) in enumerate(stages, start=1):
        for block in range(blocks):
            name, outputs, stride = f"layer{stage}.{block}", 4 * width, first_stride if block == 0 else 1
            after = _strided(pixels, stride)
            yield from _convolution(f"{name}.conv1", channels, width, 1, pixels)
            yield from _norm(f"{name}.bn1", width)
            yield from _convolution(f"{name}.conv2", width, width, 3, after)
            yield from _norm(f"{name}.bn2", width)
            yield from _convolution(f"{name}.conv3", width, outputs, 1, after)
            yield from _norm(f"{name}.bn3", outputs)
            if stride > 1 or channels != outputs:
                yield from _convolution(f"{name}.downsample.0", channels, outputs, 1, after)
                yield from _norm(f"{name}.downsample.1", outputs)
            channels, pixels = outputs, after
    yield from _linear("fc", channels, _CLASSES)


def _strided(pixels: int, stride: int) -> int:
    return -(-pixels // stride)


def _vgg16() -> Iterator[Parameter]:
    """Yield VGG-16 (Simonyan, Zisserman, arXiv 1409.1556, configuration D), 138,357,544 parameters.

    Nine tenths of them are in three linear layers. Names are torchvision's.
    """
    channels, pixels, place, hidden = 3, _PIXELS, 0, 4096
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):  # 3x3 before each pooling
        for _ in range(convolutions):
            yield from _convolution(f"features.{place}", channels, width, 3, pixels, bias=True)
            channels, place = width, place + 2  # an activation follows
        pixels, place = pixels // 2, place + 1
    yield from _linear("classifier.0", channels * pixels**2, hidden)
    yield from _linear("classifier.3", hidden, hidden)
    yield from _linear("classifier.6", hidden, _CLASSES)


def _swin_t() -> Iterator[Parameter]:
    """Yield Swin-T (Liu et al., arXiv 2103.14030), 28,288,354 parameters; names are torchvision's."""
    patch, window, width = 4, 7, 96
    side = _PIXELS // patch
    yield from _convolution("features.0.0", 3, width, patch, side, bias=True)
    yield from _norm("features.0.2", width)
    for stage, (blocks, heads) in enumerate(((2, 3), (2, 6), (6, 12), (2, 24))):
        if stage:
            width, side = 2 * width, side // 2
            yield from _norm(f"features.{2 * stage}.norm", 2 * width)
            yield from _linear(f"features.{2 * stage}.reduction", 2 * width, width, side**2, bias=False)
        for block in range(blocks):
            name, tokens = f"features.{2 * stage + 1}.{block}", side**2
            attention = attention_flops(tokens, window**2, width)
            yield from _norm(f"{name}.norm1", width)
            yield from _linear(f"{name}.attn.qkv", width, 3 * width, tokens)
            yield Parameter(f"{name}.attn.relative_position_bias_table", ((2 * window - 1) ** 2, heads))
            yield from _linear(f"{name}.attn.proj", width, width, tokens, more_flops=attention)
            yield from _norm(f"{name}.norm2", width)
            yield from _linear(f"{name}.mlp.0", width, 4 * width, tokens)
            yield from _linear(f"{name}.mlp.3", 4 * width, width, tokens)
    yield from _norm("norm", width)
    yield from _linear("head", width, _CLASSES)


def bert_parameters(layers: int, width: int, sequence: int) -> Iterator[Parameter]:
    """Yield BERT as it is pre-trained (Devlin et al., arXiv 1810.04805): encoder, pooler and both heads.

    Names as in Hugging Face's BertForPreTraining. The decoder's weight is the word embedding's, counted once.
    """
    vocabulary, segments = 30_522, 2
    masked = -(-15 * sequence // 100)  # section 3.1: only these positions go through the language model's head
    for what, rows in (("word", vocabulary), ("position", 512), ("token_type", segments)):
        yield Parameter(f"bert.embeddings.{what}_embeddings.weight", (rows, width))
    yield from _norm("bert.embeddings.LayerNorm", width)
    attention = attention_flops(sequence, sequence, width)
    for number in range(layers):
        layer = f"bert.encoder.layer.{number}"
        for what in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{what}", width, width, sequence)
        yield from _linear(f"{layer}.attention.output.dense", width, width, sequence, more_flops=attention)
        yield from _norm(f"{layer}.attention.output.LayerNorm", width)
        yield from _linear(f"{layer}.intermediate.dense", width, 4 * width, sequence)
        yield from _linear(f"{layer}.output.dense", 4 * width, width, sequence)
        yield from _norm(f"{layer}.output.LayerNorm", width)
    yield from _linear("bert.pooler.dense", width, width)
    yield from _linear("cls.predictions.transform.dense", width, width, masked)
    yield from _norm("cls.predictions.transform.LayerNorm", width)
    # The product with the tied weight: the bias is what its layer has of its own.
    yield Parameter("cls.predictions.bias", (vocabulary,), 2 * vocabulary * width * masked)
    yield from _linear("cls.seq_relationship", width, segments)


def gpt2_parameters(layers: int, width: int, sequence: int) -> Iterator[Parameter]:
    """Yield GPT-2 (Radford et al. 2019), names and shapes as in Hugging Face's GPT2LMHeadModel, the tied head once.

    Attention counts as if each token looked at all others: half of it is masked, and only some kernels leave that out.
    """
    vocabulary = 50_257
    yield Parameter("transformer.wte.weight", (vocabulary, width))
    yield Parameter("transformer.wpe.weight", (1024, width))
    attention = attention_flops(sequence, sequence, width)
    linear = partial(_linear, positions=sequence, inputs_first=True)
    for number in range(layers):
        layer = f"transformer.h.{number}"
        yield from _norm(f"{layer}.ln_1", width)
        yield from linear(f"{layer}.attn.c_attn", width, 3 * width)
        yield from linear(f"{layer}.attn.c_proj", width, width, more_flops=attention)
        yield from _norm(f"{layer}.ln_2", width)
        yield from linear(f"{layer}.mlp.c_fc", width, 4 * width)
        yield from linear(f"{layer}.mlp.c_proj", 4 * width, width)
    # The head has no parameter of its own. Its product is the first thing in backward, and this norm the next.
    yield from _norm("transformer.ln_f", width, 2 * vocabulary * width * sequence)


_IMAGE = f"image of {_PIXELS} x {_PIXELS} pixels"
MODELS: Mapping[str, tuple[str, Callable[[], Iterable[Parameter]]]] = {
    "resnet50": (_IMAGE, resnet50_parameters),
    "vgg16": (_IMAGE, _vgg16),
    "bert-base": ("sequence of 128 tokens", partial(bert_parameters, 12, 768, 128)),
    "bert-large": ("sequence of 128 tokens", partial(bert_parameters, 24, 1024, 128)),
    "swin-t": (_IMAGE, _swin_t),
    "gpt2": ("sequence of 1024 tokens", partial(gpt2_parameters, 12, 768, 1024)),
    "gpt2-medium": ("sequence of 1024 tokens", partial(gpt2_parameters, 24, 1024, 1024)),
}
"""By name: what the FLOPs are counted for, and the parameters."""


def model(name: str) -> Model:
    """Return the model of that name; raises ConfigurationError when there is none."""
    if name not in MODELS:
        meant = did_you_mean(name, MODELS) or ";"
        raise ConfigurationError(f"model {name!r} is unknown{meant} there are {', '.join(MODELS)}")
    sample, parameters = MODELS[name]
    return Model(name, tuple(parameters()), sample)
