"""BERT as it is pre-trained (Devlin et al., arXiv 1810.04805): encoder, pooler and both heads.

Names as in Hugging Face's BertForPreTraining. The decoder's weight is the word embedding's, counted once.
"""

from __future__ import annotations

from collections.abc import Iterator

from commopt.document import require_whole
from commopt.errors import ConfigurationError
from commopt.simulate.models.layers import attention_flops, linear, norm
from commopt.simulate.models.parameters import Model, Parameter

_VOCABULARY = 30_522
_POSITIONS = 512
_SEGMENTS = 2
_MASKED_PERCENT = 15  # section 3.1: only these positions go through the language model's head


def bert_base(sequence: int = 128) -> Model:
    """Return 12 layers of width 768: 110,106,428 parameters, 109,482,240 of them before the heads."""
    return _bert("bert-base", 12, 768, sequence)


def bert_large(sequence: int = 128) -> Model:
    """Return 24 layers of width 1024: 336,226,108 parameters, 335,141,888 of them before the heads."""
    return _bert("bert-large", 24, 1024, sequence)


def _bert(name: str, layers: int, width: int, sequence: int) -> Model:
    require_whole(sequence, 1, f"{name}: sequence")
    if sequence > _POSITIONS:
        raise ConfigurationError(f"{name}: sequence {sequence} is longer than its {_POSITIONS} positions; pass fewer")
    parameters = (*_encoder(layers, width, sequence), *_heads(width, -(-_MASKED_PERCENT * sequence // 100)))
    return Model(name, parameters, f"sequence of {sequence} tokens")


def _encoder(layers: int, width: int, sequence: int) -> Iterator[Parameter]:
    for what, rows in (("word", _VOCABULARY), ("position", _POSITIONS), ("token_type", _SEGMENTS)):
        yield Parameter(f"bert.embeddings.{what}_embeddings.weight", (rows, width))
    yield from norm("bert.embeddings.LayerNorm", width)
    attention = attention_flops(sequence, sequence, width)
    for number in range(layers):
        layer = f"bert.encoder.layer.{number}"
        for what in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{what}", width, width, sequence)
        yield from linear(f"{layer}.attention.output.dense", width, width, sequence, more_flops=attention)
        yield from norm(f"{layer}.attention.output.LayerNorm", width)
        yield from linear(f"{layer}.intermediate.dense", width, 4 * width, sequence)
        yield from linear(f"{layer}.output.dense", 4 * width, width, sequence)
        yield from norm(f"{layer}.output.LayerNorm", width)
    yield from linear("bert.pooler.dense", width, width)


def _heads(width: int, masked: int) -> Iterator[Parameter]:
    yield from linear("cls.predictions.transform.dense", width, width, masked)
    yield from norm("cls.predictions.transform.LayerNorm", width)
    # The product with the tied weight: the bias is what its layer has of its own.
    yield Parameter("cls.predictions.bias", (_VOCABULARY,), 2 * _VOCABULARY * width * masked)
    yield from linear("cls.seq_relationship", width, _SEGMENTS)
