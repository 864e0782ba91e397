# SPDX-License-Identifier: Apache-2.0
"""`Writer`: puts versions of weights where readers find them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from uuid import uuid4

import torch
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.patches.encoding import VersionId, describe, encode, supported
from commopt.patches.storage import File, storage_at


class Writer:
    """Writes weights that change, for others to follow: `write` after every step, or every few.

    address: a folder, or an address of fsspec ("s3://bucket/run"), of this writer alone.
    anchor_every: after so many versions all weights are written whole again, for those who join late.
    keep_anchors: delete what is older than so many anchors, one of which may be damaged; None keeps everything.

    A version is whole or not there, whenever the writer is killed. A new one goes on behind the last version, with an
    anchor. The memory of a writer: a copy of the weights.
    """

    def __init__(
        self, address: str | os.PathLike[str], *, anchor_every: int = 100, keep_anchors: int | None = None
    ) -> None:
        for name, value in (("anchor_every", anchor_every), ("keep_anchors", keep_anchors)):
            if (value is not None or name == "anchor_every") and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"Writer({name}={value!r}) is no positive whole number; leave it out, or give one"
                )
        self.anchor_every = anchor_every
        self.keep_anchors = keep_anchors
        self._storage = storage_at(address)
        self._storage.clean()
        self._number = max((file.number for file in self._storage.files()), default=-1)
        self._name, self._first = uuid4().hex, self._number + 1
        self._tensors: dict[str, Tensor] = {}
        self._state = ""  # of the last version; "" where the next one must be an anchor
        self._since_anchor = 0

    @property
    def version(self) -> int | None:
        """The number of the last version there is, None before the first one."""
        return None if self._number < 0 else self._number

    def write(self, tensors: Mapping[str, Tensor]) -> int:
        """Write a version, as of model.state_dict(), and return its number.

        Of bfloat16 and float16 what has changed is written; of other dtypes tensors that have changed at all. Raises
        UnsupportedTensorError for what is no plain tensor, and what storage raises: the next version is an anchor then.
        """
        copies = {name: _copied(name, values) for name, values in tensors.items()}
        follows = bool(self._state) and describe(copies) == describe(self._tensors)
        previous, self._state = self._state, ""
        self._number += 1
        version = VersionId(self._number, uuid4().hex, previous, self._name, self._first)
        if follows:
            content = encode(version, copies, self._tensors)
            self._storage.write(File(self._number, "patch"), content)
        self._since_anchor += 1
        if not follows or self._since_anchor >= self.anchor_every:
            anchor = encode(replace(version, previous=""), copies, None)
            self._storage.write(File(self._number, "anchor"), anchor)
            self._since_anchor = 0
            self._delete_old()
        self._tensors, self._state = copies, version.state
        return self._number

    def _delete_old(self) -> None:
        if self.keep_anchors is None:
            return
        files = self._storage.files()
        anchors = [file.number for file in files if file.kind == "anchor"]
        oldest = min(anchors[-self.keep_anchors :])
        for file in files:
            if file.number < oldest:
                self._storage.delete(file)


def _copied(name: str, values: Tensor) -> Tensor:
    if type(name) is not str or not isinstance(values, Tensor) or hasattr(values, "to_local"):
        raise UnsupportedTensorError(
            f"{name!r} is a {type(values).__name__}; write plain tensors by name: full_tensor() of a DTensor on one "
            f"rank, or to_local() of each rank in a folder of its own"
        )
    if values.layout != torch.strided or values.is_quantized or not supported(values.dtype):
        raise UnsupportedTensorError(
            f"{name!r} is {values.layout}, {values.dtype}, which has no form in a file; leave it out"
        )
    return values.detach().to("cpu", copy=True).contiguous()
