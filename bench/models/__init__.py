"""What benchmarks train: the example's GPT, and models that look at images which need no download."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from bench.models.images import ImageTraining
from bench.models.resnet import ResNet50
from bench.models.trainable import Trainable
from bench.models.vgg import VGG11
from bench.models.vit import ViT
from commopt.command_line import whole
from examples.train_gpt import Training, add_model_options

MODELS: dict[str, Callable[[argparse.Namespace, torch.device], Trainable]] = {
    "gpt": Training,
    "resnet50": partial(ImageTraining, build=lambda pixels: ResNet50()),
    "vgg11": partial(ImageTraining, build=lambda pixels: VGG11()),
    "vit": partial(ImageTraining, build=ViT),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what chooses a model, and what the models read from their options."""
    parser.add_argument("--model", choices=MODELS, default="gpt", help="what to train (default gpt)")
    parser.add_argument("--pixels", type=whole(1), default=32, help="images are so high and wide (default 32)")
    add_model_options(parser)


__all__ = ["MODELS", "VGG11", "ImageTraining", "ResNet50", "Trainable", "ViT", "add_options"]
