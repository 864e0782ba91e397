# SPDX-License-Identifier: Apache-2.0
"""The bytes of a file: an anchor has all tensors whole, a patch what has changed in each since the version before.

A line that tells the format, the length of a header (8 bytes), the header in JSON, the tensors one after the other, and
a SHA-256 of all this. A version has a random state; a patch names the one it was made of. So no patch is ever applied
to other weights, whoever wrote them under the same number. A version also names its writer and the number that this
began with, which tell a folder that has begun anew from one that is shown as it was before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import prod
from typing import Any

import torch
from torch import Tensor

from commopt.attached.checksum import as_bytes
from commopt.kernels.differences import MANTISSA, largest_nbytes, memory_nbytes, pack_difference, unpack_difference

_MAGIC = b"commopt weights 1\n"
_LENGTH_NBYTES, _DIGEST_NBYTES = 8, 32
_MOST_HEADER_NBYTES = 1 << 26
_MOST_DIMENSIONS = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
    )
}
_RAW, _SAME, _DIFFERENCE = "raw", "same", "difference"

Tensors = Mapping[str, Tensor]


class DamagedError(ValueError):
    """A file is not whole, or not one that `encode` made of these tensors."""


@dataclass(frozen=True)
class FileEntry:
    """A tensor in a file. coding: "raw", "same" as in the version before, or its "difference" to that."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    coding: str
    nbytes: int

    @property
    def whole_nbytes(self) -> int:
        """The bytes of all its numbers."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class VersionId:
    """A version of the weights. state: a name that no other has; previous: that of the one before, "" in an anchor.

    writer: a name that no other has; first: the number of its first version. Files without them are of one writer.
    """

    number: int
    state: str
    previous: str
    writer: str = ""
    first: int = 0


def describe(tensors: Tensors) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return names, dtypes and shapes: what must stay for patches to apply."""
    return [(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()]


def supported(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can be written."""
    return dtype in _DTYPES.values()


def longest_nbytes(tensors: Tensors) -> int:
    """Return how long a file of such tensors can be at most."""
    names = sum(len(json.dumps(name)) + 12 * (each.ndim + 16) for name, each in tensors.items())
    return 1024 + names + sum(each.numel() * each.element_size() + 64 for each in tensors.values())


# ------------------------------------------------------------------------------------------- written


def encode(version: VersionId, tensors: Tensors, before: Tensors | None) -> bytes:
    """Return a file. tensors: contiguous, on the CPU. before: those of the version before, None for an anchor."""
    entries, parts = [], []
    for (name, dtype, shape), values in zip(describe(tensors), tensors.values(), strict=True):
        coding, part = _encoded(values, None if before is None else before[name])
        entries.append(FileEntry(name, dtype, shape, coding, len(part)))
        parts.append(part)
    header = json.dumps({**asdict(version), "tensors": [list(asdict(each).values()) for each in entries]}).encode()
    if len(header) > _MOST_HEADER_NBYTES:
        raise ValueError(
            f"names and shapes of {len(entries)} tensors take {len(header)} bytes; write fewer to a folder"
        )
    content = b"".join((_MAGIC, len(header).to_bytes(_LENGTH_NBYTES, "little"), header, *parts))
    return content + sha256(content).digest()


def _encoded(values: Tensor, before: Tensor | None) -> tuple[str, bytes]:
    if before is not None and torch.equal(as_bytes(values), as_bytes(before)):
        return _SAME, b""
    if before is None or values.dtype not in MANTISSA:
        return _RAW, as_bytes(values).numpy().tobytes()
    message = torch.empty(memory_nbytes(values.numel()), dtype=torch.uint8)
    nbytes = pack_difference(values.view(-1), before.view(-1), message)
    return _DIFFERENCE, message[:nbytes].numpy().tobytes()


# ------------------------------------------------------------------------------------------- read


def decode(content: bytes) -> tuple[VersionId, list[FileEntry], memoryview]:
    """Return what a whole file says, and its tensors' bytes. Raises DamagedError for another; allocates nothing."""
    fixed = len(_MAGIC) + _LENGTH_NBYTES
    if len(content) < fixed + _DIGEST_NBYTES or not content.startswith(_MAGIC):
        raise DamagedError("it is not whole, or no file of weights")
    view = memoryview(content)
    if sha256(view[:-_DIGEST_NBYTES]).digest() != view[-_DIGEST_NBYTES:]:
        raise DamagedError("its checksum is another: it is not whole, or was changed")
    header_nbytes = int.from_bytes(view[len(_MAGIC) : fixed], "little")
    if header_nbytes > min(_MOST_HEADER_NBYTES, len(content) - fixed - _DIGEST_NBYTES):
        raise DamagedError(f"its header of {header_nbytes} bytes is longer than it is")
    try:
        header = json.loads(content[fixed : fixed + header_nbytes])
        version = VersionId(
            *(_checked(header["number"], int), _checked(header["state"], str), _checked(header["previous"], str)),
            *(_checked(header.get("writer", ""), str), _checked(header.get("first", 0), int)),
        )
        entries = [_entry(*each) for each in _checked(header["tensors"], list)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"its header is no header: {error}") from None
    body = view[fixed + header_nbytes : -_DIGEST_NBYTES]
    if sum(each.nbytes for each in entries) != len(body) or len({each.name for each in entries}) < len(entries):
        raise DamagedError("its header is about other tensors")
    return version, entries, body


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _entry(name: Any, dtype: Any, shape: Any, coding: Any, nbytes: Any) -> FileEntry:
    sizes = tuple(_checked(size, int) for size in _checked(shape, list))
    entry = FileEntry(_checked(name, str), _checked(dtype, str), sizes, coding, _checked(nbytes, int))
    if dtype not in _DTYPES or len(sizes) > _MOST_DIMENSIONS or any(not 0 <= size < 2**62 for size in sizes):
        raise ValueError(f"{name!r} has dtype {dtype!r} and shape {shape}")
    whole = entry.whole_nbytes
    fits = {_RAW: nbytes == whole, _SAME: nbytes == 0, _DIFFERENCE: 0 <= nbytes <= largest_nbytes(prod(sizes))}
    if coding == _DIFFERENCE and _DTYPES[dtype] not in MANTISSA:
        raise ValueError(f"{name!r} of {dtype} has no difference")
    if not fits.get(coding, False):
        raise ValueError(f"{name!r} of {whole} bytes is {coding!r} in {nbytes}")
    return entry


def anchored(entries: list[FileEntry], body: memoryview) -> dict[str, Tensor]:
    """Return the tensors of an anchor. Raises DamagedError for a patch."""
    if any(entry.coding != _RAW for entry in entries):
        raise DamagedError("it is no anchor")
    return {entry.name: _raw(entry, part) for entry, part in _parts(entries, body)}


def patched(entries: list[FileEntry], body: memoryview, before: Tensors) -> dict[str, Tensor]:
    """Return the tensors that a patch makes of those before, which stay; what is the same is shared.

    Raises DamagedError where it is about others.
    """
    if [(entry.name, entry.dtype, entry.shape) for entry in entries] != describe(before):
        raise DamagedError("it is about other tensors")
    found = {}
    for entry, part in _parts(entries, body):
        values = before[entry.name]
        if entry.coding == _RAW:
            values = _raw(entry, part)
        elif entry.coding == _DIFFERENCE:
            values, message = values.clone(), torch.frombuffer(bytearray(part), dtype=torch.uint8)
            try:
                unpack_difference(message, values.view(-1))
            except ValueError as error:
                raise DamagedError(str(error)) from None
        found[entry.name] = values
    return found


def _parts(entries: list[FileEntry], body: memoryview) -> Iterator[tuple[FileEntry, memoryview]]:
    at = 0
    for entry in entries:
        yield entry, body[at : at + entry.nbytes]
        at += entry.nbytes


def _raw(entry: FileEntry, part: memoryview) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    values = torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
    if dtype == torch.bool and part and int(values.max()) > 1:
        raise DamagedError(f"{entry.name!r} has other bytes than those of booleans")
    try:
        return values.view(dtype).view(entry.shape)
    except RuntimeError as error:  # of no elements, but of sizes whose product torch cannot count
        raise DamagedError(f"{entry.name!r} has shape {entry.shape}: {error}") from None
