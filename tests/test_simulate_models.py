# SPDX-License-Identifier: Apache-2.0
"""Models against what is published of them: every parameter, the FLOPs of a forward, and real modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.vision import ResNet50, SwinT, WindowAttention
from commopt.errors import ConfigurationError
from commopt.simulate.model_zoo import (
    MODELS,
    Model,
    Parameter,
    bert_parameters,
    gpt2_parameters,
    model,
    resnet50_parameters,
)


def numel(parameters: list[Parameter]) -> int:
    return sum(prod(parameter.shape) for parameter in parameters)


def names(name: str) -> list[str]:
    return [parameter.name for parameter in model(name).parameters]


COUNTS = {
    "resnet50": (25_557_032, 161),
    "vgg16": (138_357_544, 32),
    "swin-t": (28_288_354, 173),
    "bert-base": (110_106_428, 206),
    "bert-large": (336_226_108, 398),
    "gpt2": (124_439_808, 148),
    "gpt2-medium": (354_823_168, 292),
}


def test_every_parameter_is_there() -> None:
    assert COUNTS.keys() == MODELS.keys()
    for name, (elements, tensors) in COUNTS.items():
        found = model(name)
        assert (found.name, found.numel, len(found.parameters)) == (name, elements, tensors)
        assert len({parameter.name for parameter in found.parameters}) == tensors


def test_bert_before_its_heads() -> None:
    for name, elements in (("bert-base", 109_482_240), ("bert-large", 335_141_888)):
        assert numel([p for p in model(name).parameters if p.name.startswith("bert.")]) == elements


@pytest.mark.parametrize(("name", "gmacs"), [("resnet50", 4.089), ("vgg16", 15.47), ("swin-t", 4.491)])
def test_forward_of_an_image_as_published(name: str, gmacs: float) -> None:
    assert model(name).forward_flops == pytest.approx(2e9 * gmacs, rel=5e-4)  # published to four digits


def test_resnet_is_the_module_that_bench_trains() -> None:
    with torch.device("meta"):
        module = ResNet50()
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    assert Counter(parameter.shape for parameter in resnet50_parameters()) == Counter(shapes)


@pytest.mark.parametrize("pixels", [100, 224])
def test_resnet_computes_what_the_module_does(pixels: int) -> None:
    with torch.device("meta"):
        module, image = ResNet50().eval(), torch.empty(1, 3, pixels, pixels)
    with FlopCounterMode(display=False) as counted:
        module(image)
    assert Model("", tuple(resnet50_parameters(pixels)), "").forward_flops == counted.get_total_flops()


def test_swin_is_the_module_that_bench_trains() -> None:
    with torch.device("meta"):
        module, image = SwinT(), torch.empty(1, 3, 224, 224)
    parameters = sorted(parameter.numel() for parameter in module.parameters())
    assert parameters == sorted(prod(parameter.shape) for parameter in model("swin-t").parameters)
    with FlopCounterMode(display=False) as counted:
        module(image)
    assert counted.get_total_flops() == pytest.approx(model("swin-t").forward_flops, rel=5e-3)


@pytest.mark.parametrize(("side", "window", "shift"), [(8, 4, 0), (8, 4, 2), (14, 7, 3), (4, 4, 0)])
def test_swin_attends_inside_of_its_windows_as_one_attention_with_a_mask_would(
    side: int, window: int, shift: int
) -> None:
    module = WindowAttention(12, 3, window, shift)
    torch.nn.init.normal_(module.bias)
    x = torch.randn(2, side, side, 12)
    q, k, v = module.qkv(x).view(2, side**2, 3, 3, 4).permute(2, 0, 3, 1, 4)
    rows, cols = torch.arange(side**2) // side, torch.arange(side**2) % side
    together, distances = torch.ones(side**2, side**2, dtype=torch.bool), []
    for place in (rows, cols):
        number = (place - shift) // window  # those at an edge are windows of their own
        together &= number[:, None] == number
        distances.append((place[:, None] - place).clamp(1 - window, window - 1) + window - 1)
    scores = q @ k.transpose(-1, -2) / 2 + module.bias[:, distances[0], distances[1]]
    mixed = scores.masked_fill(~together, -torch.inf).softmax(-1) @ v
    expected = module.project(mixed.transpose(1, 2).reshape(2, side, side, 12))
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("sequence", "masked"), [(128, 20), (512, 77)])
def test_bert_computes_two_flops_per_weight_and_token_and_attention(sequence: int, masked: int) -> None:
    layers, width = 24, 1024
    found = Model("", tuple(bert_parameters(layers, width, sequence)), "")
    matrices = [p for p in found.parameters if p.name.startswith("bert.encoder.") and len(p.shape) == 2]
    encoder = 2 * numel(matrices) * sequence + layers * 2 * 2 * sequence**2 * width
    assert sum(parameter.forward_flops for parameter in matrices) == encoder
    heads = 2 * masked * width * (width + 30_522) + 2 * width * 2 + 2 * width * width  # and the pooler
    assert found.forward_flops == encoder + heads


@pytest.mark.parametrize("sequence", [256, 1024])
def test_gpt2_computes_as_the_formula_of_palm_says(sequence: int) -> None:
    """arXiv 2204.02311, appendix B: 6 N + 12 L H Q T for each token, forward a third of it; N without positions."""
    layers, width = 24, 1024
    found = Model("", tuple(gpt2_parameters(layers, width, sequence)), "")
    per_token = (6 * (found.numel - 1024 * width) + 12 * layers * width * sequence) / 3
    assert found.forward_flops == pytest.approx(sequence * per_token, rel=0.002)  # N has biases and norms in it


def test_tied_weights_stand_at_their_first_use_and_their_product_at_the_last_layer() -> None:
    first, *_, last, shift = model("gpt2").parameters
    assert (first.name, first.shape, first.forward_flops) == ("transformer.wte.weight", (50_257, 768), 0)
    assert (last.name, last.forward_flops) == ("transformer.ln_f.weight", 2 * 50_257 * 768 * 1024)
    assert (shift.name, shift.forward_flops) == ("transformer.ln_f.bias", 0)
    assert not [each for each in (*names("gpt2"), *names("bert-base")) if "lm_head" in each or "decoder" in each]


def test_names_are_those_of_the_usual_implementations() -> None:
    resnet, vgg, swin, bert = names("resnet50"), names("vgg16"), names("swin-t"), names("bert-base")
    assert resnet[:4] == ["conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight"]
    assert resnet[-5:] == ["layer4.2.conv3.weight", "layer4.2.bn3.weight", "layer4.2.bn3.bias", "fc.weight", "fc.bias"]
    convolutions = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    layers = [f"features.{place}" for place in convolutions] + [f"classifier.{place}" for place in (0, 3, 6)]
    assert vgg[::2] == [f"{layer}.weight" for layer in layers]
    assert {name for name in MODELS if model(name).convolutional} == {"resnet50", "vgg16"}
    assert swin[:4] == ["features.0.0.weight", "features.0.0.bias", "features.0.2.weight", "features.0.2.bias"]
    assert {"features.5.5.mlp.3.bias", "features.6.reduction.weight", "features.6.norm.weight"} <= set(swin)
    assert "features.6.reduction.bias" not in swin
    assert bert[0] == "bert.embeddings.word_embeddings.weight"
    assert "bert.encoder.layer.11.attention.self.query.weight" in bert
    assert bert[-3:] == ["cls.predictions.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: model("resnet51"), r"model 'resnet51' is unknown; did you mean resnet50\? there are resnet50, vgg16"),
        (lambda: Parameter("", (1,)), r"parameter: name is ''"),
        (lambda: Parameter("w", (2, 0)), r"parameter 'w': an extent of its shape is 0"),
        (lambda: Parameter("w", (2,), -1), r"parameter 'w': forward_flops is -1"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        wrong()
