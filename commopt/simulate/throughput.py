# SPDX-License-Identifier: Apache-2.0
"""Published rates of one GPU in training, and the rates that follow for other GPUs and models.

Sources of the table:
- NVIDIA: DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5 and PyTorch/LanguageModeling/BERT, READMEs,
  "Training performance", one GPU; BERT with sequences of 128 tokens.
- nanoGPT: github.com/karpathy/nanoGPT, README and config/train_gpt2.py: 600,000 steps of 480 sequences of 1,024 tokens
  in about 4 days on 8 A100. llm.c, in CUDA C, is twice as fast (its discussion 481: 1e10 tokens in 90 minutes).
- Schwartz: jjschwartz.github.io/blog/scaling-gpt2.html: 3 million tokens a second on 8 H100.
- timm: github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv.
- TensorFlow: its benchmarks page of May 2017, DGX-1, one P100, synthetic data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from commopt.simulate.cluster import GPUS, GpuSpec
from commopt.simulate.model_zoo import Model, model

BACKWARD_PER_FORWARD = 2  # gradients of the inputs and of the weights: a product each, as large as forward's


@dataclass(frozen=True)
class Published:
    """Samples of a model that one GPU trains in a second, as the source says; see the top of this file."""

    model: str
    gpu: str
    precision: str
    samples_per_s: float
    source: str

    @property
    def peak_tflops(self) -> float:
        """What the GPU's data sheet has for the precision."""
        return GPUS[self.gpu].peak_tflops(self.precision)

    def __str__(self) -> str:
        return f"{self.samples_per_s:g}/s of {self.model} on {self.gpu} ({self.source})"


PUBLISHED = (
    Published("resnet50", "a100", "fp16", 2470, "NVIDIA"),
    Published("resnet50", "a100", "tf32", 938, "NVIDIA"),
    Published("resnet50", "v100", "fp16", 1200, "NVIDIA"),
    Published("resnet50", "v100", "fp32", 367, "NVIDIA"),
    Published("resnet50", "p100", "fp32", 219, "TensorFlow"),
    Published("resnet50", "rtx3090", "fp16", 1218, "timm"),
    Published("vgg16", "rtx3090", "fp16", 546, "timm"),
    Published("vgg16", "p100", "fp32", 154, "TensorFlow"),
    Published("swin-t", "rtx3090", "fp16", 649, "timm"),
    Published("bert-large", "a100", "fp16", 580, "NVIDIA"),
    Published("bert-large", "a100", "tf32", 317, "NVIDIA"),
    Published("bert-large", "v100", "fp16", 224, "NVIDIA"),
    Published("bert-large", "v100", "fp32", 50, "NVIDIA"),
    Published("gpt2", "a100", "bf16", 104, "nanoGPT"),
    Published("gpt2", "h100", "bf16", 366, "Schwartz"),
)


BATCHES = {
    **dict.fromkeys(("resnet50", "swin-t", "bert-base", "bert-large"), 256),
    **{"vgg16": 384, "gpt2": 12},
}
"""Samples per GPU of the published rates, by model."""

_KIN = {"gpt2-medium": "gpt2"}  # of models for which nothing is published


def usual_batch(name: str) -> int:
    """Return the samples per GPU in the published figures of a model, or of its kin."""
    return BATCHES[_KIN.get(name, name)]


def usual_efficiency(subject: Model, gpu: GpuSpec, precision: str) -> tuple[float, str]:
    """Return the share of the GPU's peak that a step reaches, at most 1, and its source.

    What is published for this model on this GPU; else on another GPU or in another precision, times the ratio of the
    peaks or that of the memories' rates, whichever is smaller (from V100 to A100 that makes ResNet-50 10 % too fast and
    BERT-large 12 % too slow). Of other models: the share of one of the same kind. bf16 counts as fp16. Raises
    ConfigurationError for a precision that the GPU does not have.
    """
    peak_tflops = gpu.peak_tflops(precision)
    kin = _KIN.get(subject.name, "resnet50" if subject.convolutional else "bert-large")
    name = subject.name if any(each.model == subject.name for each in PUBLISHED) else kin
    flops = (1 + BACKWARD_PER_FORWARD) * (subject if name == subject.name else model(name)).forward_flops
    found = min(
        (each for each in PUBLISHED if each.model == name),
        key=lambda each: (
            not _alike(each.precision, precision),
            each.gpu != gpu.name,
            abs(log(each.peak_tflops / peak_tflops)),
        ),
    )
    faster = min(peak_tflops / found.peak_tflops, gpu.memory_gb_per_s / GPUS[found.gpu].memory_gb_per_s)
    return min(1.0, flops * found.samples_per_s * faster / (peak_tflops * 1e12)), f"from {found}"


def _alike(one: str, other: str) -> bool:
    return one == other or {one, other} == {"fp16", "bf16"}
