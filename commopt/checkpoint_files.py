# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save that are complete or absent, and that tell when a bit of them has changed."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import shutil
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from secrets import token_hex
from typing import IO, TYPE_CHECKING, Any

import torch

from commopt.document import path_of
from commopt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("commopt")

# A zip archive, as torch.save writes it, ends with this record, whose last field is the length of a comment behind it.
# torch.load, and whatever else reads archives, passes over the comment.
_END_NBYTES = 22
_SIGNATURE = b"PK\x05\x06"
_MARK = b"commopt sha256 "
_COMMENT_NBYTES = len(_MARK) + 2 * hashlib.sha256().digest_size
_READ_NBYTES = 1 << 20
_UNFINISHED = re.compile(r"\.\d+-[0-9a-f]{8}\.unfinished")
_FIX = "; load another checkpoint, or start without one"


def save_checkpoint(content: object, path: str | Path) -> None:
    """Write `content` as torch.save does, complete or not at all, with a checksum; torch.load reads it too.

    A process that is killed meanwhile, or a machine that goes down, leaves the file that was there, and so does a full
    disk. That file is kept as `path`.previous, for a disk that damages the new one. Of a symbolic link the file that it
    points to is written. One process writes a path: where several do, all but the last raise FileExistsError. Raises
    OSError when the file cannot be written.
    """
    path = path_of(path).resolve()
    _remove_unfinished(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{token_hex(4)}.unfinished")
    kept = path.with_name(f"{path.name}.kept")
    try:
        _write(content, unfinished)
        with _alone(path):
            kept.unlink(missing_ok=True)
            replaces = path.is_file()
            if replaces:
                _link(path, kept)
            unfinished.replace(path)
            if replaces:  # last, so that of the two files one is whole at any time, even if the old one was damaged
                kept.replace(previous(path))
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def load_checkpoint(path: str | Path, **options: Any) -> Any:
    """Return what `save_checkpoint` wrote last, or before that if the last file is damaged; None where there is none.

    options: for torch.load; by default map_location="cpu" and weights_only=True. A warning says why the file of before
    was taken. Raises ConfigurationError when neither is whole. A file of torch.save itself, which has no checksum, is
    read as it is.
    """
    path, problems = path_of(path), list[str]()
    if not path.exists():
        return None
    for candidate in (path, previous(path)):
        try:
            content = load_whole(candidate, **options)
        except (ConfigurationError, FileNotFoundError) as error:
            problems.append(str(error))
            continue
        if problems:
            _log.warning("%s. Going on from the one before, %s", problems[0].partition("; ")[0], candidate)
        return content
    raise ConfigurationError(
        f"{problems[0]}. No whole {previous(path).name} is there; move the file away to start anew"
    )


def load_whole(path: Path, **options: Any) -> Any:
    """Return the content of a file, as `load_checkpoint`. Raises ConfigurationError when it is not whole."""
    try:
        with path.open("rb") as file:
            checked = _is_checked(file, str(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return torch.load(path, **{"map_location": "cpu", "weights_only": True, **options})
    except Exception as error:
        if checked:  # the file is whole, and the mistake is another one
            raise
        raise ConfigurationError(f"{path} cannot be read: {error}") from None


def to_bytes(content: object) -> bytes:
    """Return what `save_checkpoint` would write."""
    _write_to(content, file := BytesIO())
    return file.getvalue()


def from_bytes(data: bytes, name: str) -> Any:
    """Return what `to_bytes`, or torch.save, made bytes of. Raises ConfigurationError, with `name`, for damaged ones.

    And what torch.load raises.
    """
    _is_checked(file := BytesIO(data), name)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def previous(path: Path) -> Path:
    """Return where the file that was at `path` before is kept: beside the file that a symbolic link points to."""
    path = path.resolve()
    return path.with_name(f"{path.name}.previous")


def identity(path: Path) -> tuple[int, ...] | None:
    """Return what tells a file from one that takes its place; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def claim(path: Path) -> tuple[int, ...] | None:
    """Let a process that has written `path` find another file there, or fail if it is writing; the content stays.

    Returns the identity before.
    """
    path = path.resolve()
    with suppress(OSError):  # the folder, or the file, may be another user's
        _remove_unfinished(path)
    before = identity(path)
    with suppress(OSError):
        os.utime(path)
    return before


def _remove_unfinished(path: Path) -> None:
    """Remove what a process that was killed has left. If it lives and writes, it finds out when it ends."""
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.unfinished"):
        if _UNFINISHED.fullmatch(leftover.name, len(path.name)):  # of this path, and of no longer one
            leftover.unlink(missing_ok=True)


def _is_checked(file: IO[bytes], name: str) -> bool:
    """Return whether a file has a checksum, which is right. Raises ConfigurationError when the file is not whole."""
    begin = max(file.seek(0, os.SEEK_END) - _COMMENT_NBYTES - _END_NBYTES, 0)
    file.seek(begin)
    tail = file.read()
    if (last := tail[-_END_NBYTES:]) and last == _end_of(last, 0):
        return False  # of torch.save
    end, comment = tail[:_END_NBYTES], tail[_END_NBYTES:]
    if not comment.startswith(_MARK) or end != _end_of(end, _COMMENT_NBYTES):
        raise ConfigurationError(f"{name} cannot be read: it is incomplete, or no checkpoint{_FIX}")
    file.seek(0)
    found, left = hashlib.sha256(), begin
    while left and (part := file.read(min(left, _READ_NBYTES))):
        found.update(part)
        left -= len(part)
    found.update(_end_of(end, 0))
    if comment[len(_MARK) :] != found.hexdigest().encode():
        raise ConfigurationError(
            f"{name} cannot be read: its checksum says that it has changed since it was written{_FIX}"
        )
    return True


def _end_of(record: bytes, comment_nbytes: int) -> bytes:
    """Return the record at the end of an archive with another length of the comment; b"" where it is none."""
    if len(record) != _END_NBYTES or not record.startswith(_SIGNATURE):
        return b""
    return record[:-2] + comment_nbytes.to_bytes(2, "little")


class _HashingFile:
    """Writes to a file and hashes what it writes; torch makes a RuntimeError of an OSError, which is `error`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self._end = b""  # the last bytes, as written
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._sum.update(data)
        self._end = (self._end + bytes(memoryview(data)[-_END_NBYTES:]))[-_END_NBYTES:]
        return written

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        """Write the checksum behind the archive, as its comment."""
        changed = _end_of(self._end, _COMMENT_NBYTES)
        if not changed or self._end != _end_of(self._end, 0):
            raise RuntimeError(f"torch {torch.__version__} writes another kind of file than commopt knows; report this")
        self._file.seek(-_END_NBYTES, os.SEEK_END)
        self._file.write(changed + _MARK + self._sum.hexdigest().encode())


def _write_to(content: object, file: IO[bytes]) -> None:
    """Write what `save_checkpoint` does."""
    hashing = _HashingFile(file)
    try:
        torch.save(content, hashing)  # type: ignore[arg-type]  # all that torch needs of a file
    except RuntimeError:
        if hashing.error is not None:
            raise hashing.error from None
        raise
    hashing.finish()


def _write(content: object, path: Path) -> None:
    with path.open("xb") as file:
        _write_to(content, file)
        file.flush()
        os.fsync(file.fileno())  # it must be whole before it has its name, also when the machine goes down


def _link(path: Path, to: Path) -> None:
    try:
        os.link(path, to)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(path, to)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Say what it means when files that only this process should know are gone, or there."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise FileExistsError(
            f"{path} was written by another process at the same time: let one rank write it, or give each its own path"
        ) from None


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive the machine's going down."""
    with suppress(OSError):  # some file systems cannot, and do without
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
