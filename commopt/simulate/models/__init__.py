"""Models by their published shapes, one family a file; a new one is one function and one line in MODELS."""

from collections.abc import Callable

from commopt.errors import ConfigurationError
from commopt.simulate.models.bert import bert_base, bert_large
from commopt.simulate.models.gpt import gpt2, gpt2_medium
from commopt.simulate.models.parameters import Model, Parameter
from commopt.simulate.models.resnet import resnet50
from commopt.simulate.models.swin import swin_t
from commopt.simulate.models.vgg import vgg16

MODELS: dict[str, Callable[..., Model]] = {
    "resnet50": resnet50,
    "vgg16": vgg16,
    "bert-base": bert_base,
    "bert-large": bert_large,
    "swin-t": swin_t,
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
}

__all__ = [
    "MODELS",
    "Model",
    "Parameter",
    "bert_base",
    "bert_large",
    "gpt2",
    "gpt2_medium",
    "model",
    "resnet50",
    "swin_t",
    "vgg16",
]


def model(name: str) -> Model:
    """Return the model of that name; raises ConfigurationError when there is none."""
    if name not in MODELS:
        raise ConfigurationError(f"model {name!r} is unknown; there are {', '.join(MODELS)}")
    return MODELS[name]()
