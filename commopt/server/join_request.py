# SPDX-License-Identifier: Apache-2.0
"""A worker's request to join, validated as untrusted input: version, settings, and the model's parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commopt.errors import CommoptError, MismatchError
from commopt.feedback import Layout
from commopt.server.channel import plain
from commopt.server.settings import ParameterServer

JOIN_REQUEST_NBYTES = 2**24
"""Limit of a request to join; 100,000 parameters take a tenth of it."""

_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
_LONGEST_SETTING, _LONGEST_NAME = 2000, 1000
_MOST_NUMEL, _MOST_DIMENSIONS = 2**40, 64


@dataclass(frozen=True)
class JoinRequest:
    """A worker's version, settings and model.

    version: version of commopt.
    settings: the texts of `ParameterServer.as_text`.
    buckets: (name, shape, dtype) of each parameter, by bucket.
    """

    version: str
    settings: Mapping[str, str]
    buckets: tuple[tuple[tuple[str, tuple[int, ...], str], ...], ...]

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> JoinRequest:
        """Return the request in a JSON message. Raises MismatchError for anything that no worker would send."""
        version, settings, buckets = (message.get(name) for name in ("version", "settings", "buckets"))
        if message.get("kind") != "join" or not isinstance(version, str) or len(version) > _LONGEST_NAME:
            raise MismatchError(
                f"a worker's first message must be a request to join with its version; this is {plain(message)}"
            )
        if not isinstance(settings, dict) or settings.keys() != ParameterServer().as_text().keys():
            raise MismatchError(
                f"its settings are {plain(settings)}, not the options of a ParameterServer of this version"
            )
        for name, value in settings.items():
            if not isinstance(value, str) or len(value) > _LONGEST_SETTING:
                raise MismatchError(f"its option {name} is {plain(value)}, and must be text")
        if not isinstance(buckets, list) or not all(isinstance(each, list) and each for each in buckets) or not buckets:
            raise MismatchError("its buckets must be lists of parameters, none of them empty")
        found = tuple(tuple(_parameter(each) for each in bucket) for bucket in buckets)
        names = [name for bucket in found for name, *_ in bucket]
        if len(set(names)) != len(names):
            raise MismatchError("two of its parameters have the same name")
        if sum(math.prod(shape) for bucket in found for _, shape, _ in bucket) > _MOST_NUMEL:
            raise MismatchError(f"its model has more than {_MOST_NUMEL} elements")
        return cls(version, settings, found)

    def layouts(self) -> list[Layout]:
        """Return the layout of each bucket."""
        return [Layout.of_parameters((name, shape) for name, shape, _ in bucket) for bucket in self.buckets]

    def require_equal(self, first: JoinRequest) -> None:
        """Raise MismatchError, naming field and both values, unless this request equals the first worker's."""
        mine, theirs = self._as_flat_dict(), first._as_flat_dict()
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise MismatchError(
                    f"{name} differs: this worker has {mine.get(name, 'none')}, the others of this parameter server "
                    f"have {theirs.get(name, 'none')}; every worker must have the same model and the same "
                    f"ParameterServer(...)"
                )

    def parse_settings(self) -> ParameterServer:
        """Return the settings as an object. Raises MismatchError for invalid text."""
        try:
            return ParameterServer.read(self.settings)
        except CommoptError as error:
            raise MismatchError(str(error)) from None
        except Exception as error:  # Python or a compressor may raise anything for such text
            raise MismatchError(f"its settings cannot be read: {plain(f'{type(error).__name__}: {error}')}") from None

    def _as_flat_dict(self) -> dict[str, str]:
        """Return the compared values by name."""
        found = {"commopt version": self.version, **self.settings}
        for place, bucket in enumerate(self.buckets):
            found |= {f"parameter {name!r}": f"{dtype} {list(shape)}, in part {place}" for name, shape, dtype in bucket}
        return found


def _parameter(entry: object) -> tuple[str, tuple[int, ...], str]:
    match entry:
        case [str(name), list(shape), str(dtype)] if dtype in _DTYPES and 0 < len(name) <= _LONGEST_NAME:
            if len(shape) <= _MOST_DIMENSIONS and all(type(each) is int and 0 <= each <= _MOST_NUMEL for each in shape):
                return name, tuple(shape), dtype
    raise MismatchError(f"a parameter must be [name, shape, dtype], and this is {plain(entry)}")
