# SPDX-License-Identifier: Apache-2.0
"""Where files of weights lie: a folder, or an address that fsspec knows."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commopt.checkpoint_files import sync_folder
from commopt.document import write_whole
from commopt.errors import ConfigurationError

_NAME = re.compile(r"(\d{12})\.(anchor|patch)")
_UNFINISHED = re.compile(_NAME.pattern + r"\.[0-9a-f]{8}\.unfinished")
_LEFT_AFTER_S = 3600.0
# What file systems of fsspec say of a file that is another once the file is written again; each has a word of its own.
_STAMP = re.compile(r"etag|generation|created|updated|mtime|(last_?)?modif\w*|last_write_time", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class File:
    """A file of weights; `kind` is "anchor" or "patch".

    stamp: another one once the file is written again; "" where the place does not tell.
    """

    number: int
    kind: str
    nbytes: int = 0
    stamp: str = ""

    @property
    def name(self) -> str:
        """Its name in the folder."""
        return f"{self.number:012d}.{self.kind}"

    @classmethod
    def of(cls, name: str, nbytes: int, stamp: str) -> File | None:
        """Return the file of that name, None for others."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), found[2], nbytes, stamp)


class Storage(ABC):
    """A place for files."""

    def __init__(self, address: str) -> None:
        self.address = address

    @abstractmethod
    def files(self) -> list[File]:
        """Return the files of weights that there are, none where there is no such place."""

    @abstractmethod
    def read(self, file: File) -> bytes:
        """Return what is in a file. Raises FileNotFoundError."""

    @abstractmethod
    def write(self, file: File, content: bytes) -> None:
        """Make a file, whole or not at all as far as the place can promise it."""

    @abstractmethod
    def delete(self, file: File) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what killed writers have left."""


class Folder(Storage):
    """A folder of this machine, or one that is mounted."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._path = Path(address)
        if self._path.exists() and not self._path.is_dir():
            raise ConfigurationError(f"{address} is a file; give the folder in which files of weights are, or shall be")

    def files(self) -> list[File]:
        """Return the files of weights."""
        named = []
        with suppress(FileNotFoundError), os.scandir(self._path) as found:
            for each in found:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if each.is_file():
                        status = each.stat()
                        stamp = f"{status.st_mtime_ns} {status.st_ctime_ns}"
                        named.append(File.of(each.name, status.st_size, stamp))
        return sorted(file for file in named if file is not None)

    def read(self, file: File) -> bytes:
        """Return what is in a file."""
        return (self._path / file.name).read_bytes()

    def write(self, file: File, content: bytes) -> None:
        """Make a file: whole or not at all, also when the machine stops."""
        self._path.mkdir(parents=True, exist_ok=True)
        write_whole(self._path / file.name, content)
        sync_folder(self._path)

    def delete(self, file: File) -> None:
        """Remove a file."""
        (self._path / file.name).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove unfinished files that nobody has written to for an hour."""
        for path in self._path.glob("*.unfinished"):
            with suppress(FileNotFoundError):
                if _UNFINISHED.fullmatch(path.name) and path.stat().st_mtime < time.time() - _LEFT_AFTER_S:
                    path.unlink()


class Remote(Storage):
    """An address of fsspec. Object stores show a file when it is whole; elsewhere the checksum tells."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigurationError(
                f"{address} is an address for fsspec, which is not installed; pip install fsspec, and the package "
                f"that it needs for this one, or give a folder"
            ) from None
        try:
            self._fs, self._path = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"fsspec cannot open {address}: {error}") from None

    def _at(self, file: File) -> str:
        return f"{self._path.rstrip('/')}/{file.name}"

    def files(self) -> list[File]:
        """Return the files of weights."""
        self._fs.invalidate_cache(self._path)
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        named = [File.of(each["name"].rsplit("/", 1)[-1], each.get("size") or 0, _stamp(each)) for each in found]
        return sorted(file for file in named if file is not None)

    def read(self, file: File) -> bytes:
        """Return what is in a file."""
        content: bytes = self._fs.cat_file(self._at(file))
        return content

    def write(self, file: File, content: bytes) -> None:
        """Make a file."""
        self._fs.makedirs(self._path, exist_ok=True)
        self._fs.pipe_file(self._at(file), content)

    def delete(self, file: File) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(file))

    def clean(self) -> None:
        """Do nothing: an unfinished file has the name of a finished one, and is passed over."""


def _stamp(details: dict[str, Any]) -> str:
    return " ".join(f"{key}={details[key]}" for key in sorted(details) if _STAMP.fullmatch(key) and details[key])


def storage_at(address: str | os.PathLike[str]) -> Storage:
    """Return the place: a folder unless the address has a protocol. Raises ConfigurationError."""
    text = os.fspath(address) if isinstance(address, os.PathLike) else address
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"address {address!r} is no folder and no address; give one, for example 'weights'")
    return Remote(text) if "://" in text else Folder(text)
