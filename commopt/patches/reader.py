# SPDX-License-Identifier: Apache-2.0
"""`Reader`: follows the versions that a `Writer` puts into a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor

from commopt.attached.checksum import checksum
from commopt.errors import ConfigurationError
from commopt.patches.encoding import (
    DamagedError,
    FileEntry,
    VersionId,
    anchored,
    decode,
    describe,
    longest_nbytes,
    patched,
)
from commopt.patches.storage import File, storage_at

_log = logging.getLogger("commopt")


class Reader:
    """Follows weights from wherever it is: `update` brings `tensors` to the newest version that can be had.

    address: that of the writer.
    like: tensors with the names, dtypes and shapes that are expected, such as model.state_dict(), in any order. Files
        of others, or longer than these can need, are not read. Give it for an address that others can write to.

    A file that is not whole, or was changed, is named in a warning and in `damaged`, and passed over: a reader that
    needs it stays at its version until the next anchor. Nothing of a file is run, no length in it is believed.

    Where a writer begins at a number that the reader has had, as in a folder that was emptied, the reader follows this
    writer, with a warning. It never goes back to a version of a writer that it has followed further.

    damaged: the names of files that were passed over.
    """

    def __init__(self, address: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None) -> None:
        self.damaged: list[str] = []
        self._storage = storage_at(address)
        if like is not None and not all(isinstance(each, Tensor) for each in like.values()):
            raise ConfigurationError("Reader(like=) wants tensors by name, for example model.state_dict()")
        self._like = None if like is None else frozenset(describe(like))
        self._most_nbytes = None if like is None else longest_nbytes(like)
        self._current: tuple[VersionId | None, dict[str, Tensor]] = None, {}
        self._file: File | None = None  # the one that `_current` was read from; None once it is another or gone
        self._checksum: int | None = None  # of the tensors; None while nobody can have changed them
        self._reached: dict[str, int] = {}  # by writer, the number of its last version that this reader has had
        self._known: dict[File, VersionId | None] = {}  # what files say that were read; None for those passed over
        self._warned_of_changes = False

    @property
    def version(self) -> int | None:
        """The number of the version that `tensors` have, None before the first one."""
        version = self._current[0]
        return None if version is None else version.number

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, on the CPU. They are replaced, never changed: those that you hold stay as they are.

        They are the reader's own, for patches to be applied to: copy them before you change them in place, or train
        them after load_state_dict(assign=True). Changed ones are noticed, and all weights are read again.
        """
        return {name: values.detach() for name, values in self._current[1].items()}

    def update(self) -> bool:
        """Go to the newest version that can be had; return whether `tensors` are others now.

        Call it as often as you like. Raises what storage raises.
        """
        before = self._current[0]
        files = self._storage.files()
        # A file without a stamp may have been written again, or further: it is read again where it is needed.
        self._known = {file: self._known[file] for file in files if file.stamp and file in self._known}
        if self._file not in files:
            self._file = None
        try:
            self._advance(files)
            if self._is_passed(files):
                self._join(files)
        finally:
            if self._checksum is None:
                self._checksum = self._sum()
        now = self._current[0]
        if before is not None and now is not None and now.writer != before.writer and now.first <= before.number:
            _log.warning(
                "%s begins anew: from version %d to version %d of a writer that began with %d",
                *(self._storage.address, before.number, now.number, now.first),
            )
        return now is not before

    def _advance(self, files: list[File]) -> None:
        """Apply patches and take anchors, to higher numbers only."""
        if self._anchor_is_shorter(files):
            self._take_anchor(files)
        self._follow(files)
        newest = max((file.number for file in files), default=-1)
        if newest > (-1 if self.version is None else self.version) and self._take_anchor(files):
            self._follow(files)

    def _is_passed(self, files: list[File]) -> bool:
        """Return whether there is a version ahead that patches do not lead to from here.

        The next number tells, as a file of other weights. Where the file of this version is another or gone, so does
        the newest whole file up to there: it is of a writer that began anew, or of the past.
        """
        own = self._current[0]
        if own is None:
            return False
        least = 0 if self._file is None else own.number + 1
        near = (self._look(file) for file in reversed(files) if least <= file.number <= own.number + 1)
        version = next((each for each in near if each is not None), None)
        return version is not None and self._is_ahead(version)

    def _is_ahead(self, version: VersionId) -> bool:
        """Return whether a version is new: of a writer further than before, or of one that did not end before this."""
        own = self._current[0]
        return version.number > self._reached.get(version.writer, -1 if own is None else own.first - 1)

    def _join(self, files: list[File]) -> None:
        """Go to the version that a reader without one goes to, if it is ahead."""
        other = copy(self)
        other._current, other._file, other._checksum, other._reached = (None, {}), None, None, {}
        other._advance(files)
        version, tensors = other._current
        if version is not None and other._file is not None and self._is_ahead(version):
            self._go(other._file, version, tensors)

    def _go(self, file: File, version: VersionId, tensors: dict[str, Tensor]) -> None:
        self._current, self._file, self._checksum = (version, tensors), file, None
        self._reached[version.writer] = version.number

    def _anchor_is_shorter(self, files: list[File]) -> bool:
        """Return whether the newest anchor has fewer bytes than the patches up to it; true at the start."""
        if self.version is None:
            return True
        anchors = [file for file in files if file.kind == "anchor" and file.number > self.version]
        if not anchors:
            return False
        between = (file for file in files if file.kind == "patch" and self.version < file.number <= anchors[-1].number)
        return sum(file.nbytes for file in between) > anchors[-1].nbytes

    def _follow(self, files: list[File]) -> None:
        """Apply patches, as far as each belongs to the version before."""
        patches = {file.number: file for file in files if file.kind == "patch"}
        while self.version is not None and (file := patches.get(self.version + 1)) is not None:
            if not self._take(file):
                return

    def _take_anchor(self, files: list[File]) -> bool:
        """Go to the newest whole anchor that is newer; return whether there is one."""
        anchors = [file for file in files if file.kind == "anchor"]
        return any(self._take(file) for file in reversed(anchors) if self.version is None or file.number > self.version)

    def _take(self, file: File) -> bool:
        """Go to the version of a file; return whether that was possible."""
        if file in self._known and not self._is_wanted(self._known[file]):
            return False
        found = self._read(file)
        if found is None or not self._is_wanted(found[0]):
            return False
        version, entries, body = found
        try:
            tensors = anchored(entries, body) if file.kind == "anchor" else patched(entries, body, self._current[1])
        except DamagedError as error:
            self._pass_over(file, error)
            return False
        self._go(file, version, tensors)
        return True

    def _is_wanted(self, version: VersionId | None) -> bool:
        """Return whether a version can be gone to: an anchor that is ahead, or a patch of these very weights."""
        if version is None or not version.previous:
            return version is not None and self._is_ahead(version)
        own = self._current[0]
        return own is not None and version.previous == own.state and self._is_intact()

    def _is_intact(self) -> bool:
        """Return whether nobody has changed the tensors. torch does not count all changes, so their bits tell."""
        if self._checksum is None or self._checksum == self._sum():
            return True
        if not self._warned_of_changes:
            self._warned_of_changes = True
            _log.warning(
                "the tensors of version %s of %s were changed in place, so no patch fits them and all weights are read "
                "again; copy what is in Reader.tensors before you change it",
                *(self.version, self._storage.address),
            )
        return False

    def _sum(self) -> int:
        return int(checksum(self._current[1].values(), torch.device("cpu")))

    def _look(self, file: File) -> VersionId | None:
        """Return what a file says that it is, None for one that is passed over or gone."""
        if file not in self._known:
            self._read(file)
        return self._known.get(file)

    def _read(self, file: File) -> tuple[VersionId, list[FileEntry], memoryview] | None:
        """Return what is in a file, None for one that is passed over or gone."""
        try:
            self._require_short(file.nbytes)
            content = self._storage.read(file)
            self._require_short(len(content))
            version, entries, body = decode(content)
            if version.number != file.number or bool(version.previous) != (file.kind == "patch"):
                raise DamagedError("it has the name of another")
            if self._like is not None and self._like != {(each.name, each.dtype, each.shape) for each in entries}:
                raise DamagedError("it has other tensors than those expected")
        except FileNotFoundError:  # deleted meanwhile
            return None
        except DamagedError as error:
            self._pass_over(file, error)
            return None
        self._known[file] = version
        return version, entries, body

    def _require_short(self, nbytes: int) -> None:
        if self._most_nbytes is not None and nbytes > self._most_nbytes:
            raise DamagedError(f"its {nbytes} bytes are more than the {self._most_nbytes} that it can need")

    def _pass_over(self, file: File, error: DamagedError) -> None:
        self._known[file] = None
        if file.name not in self.damaged:
            self.damaged.append(file.name)
            _log.warning("%s in %s is passed over: %s", file.name, self._storage.address, error)
