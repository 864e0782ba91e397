# SPDX-License-Identifier: Apache-2.0
"""`Reader`: follows the versions that a `Writer` puts into a folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.patches.encoding import DamagedError, VersionId, anchored, decode, describe, longest_nbytes, patched
from commopt.patches.storage import File, storage_at

_log = logging.getLogger("commopt")


class Reader:
    """Follows weights from wherever it is: `update` brings `tensors` to the newest version that can be had.

    address: that of the writer.
    like: tensors with the names, dtypes and shapes that are expected, such as model.state_dict(). Files of others, or
        longer than these can need, are not read. Give it for an address that others can write to.

    A file that is not whole, or was changed, is named in a warning and in `damaged`, and passed over: a reader that
    needs it stays at its version until the next anchor. Nothing of a file is run, no length in it is believed.

    damaged: the names of files that were passed over.
    """

    def __init__(self, address: str | os.PathLike[str], *, like: Mapping[str, Tensor] | None = None) -> None:
        self.damaged: list[str] = []
        self._storage = storage_at(address)
        if like is not None and not all(isinstance(each, Tensor) for each in like.values()):
            raise ConfigurationError("Reader(like=) wants tensors by name, for example model.state_dict()")
        self._like = None if like is None else describe(like)
        self._most_nbytes = None if like is None else longest_nbytes(like)
        self._current: tuple[VersionId | None, dict[str, Tensor]] = None, {}
        self._passed_over: set[File] = set()

    @property
    def version(self) -> int | None:
        """The number of the version that `tensors` have, None before the first one."""
        version = self._current[0]
        return None if version is None else version.number

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, on the CPU. They are replaced, never changed: those that you hold stay as they are."""
        return self._current[1]

    def update(self) -> bool:
        """Go to the newest version that can be had; return whether `tensors` are others now.

        Call it as often as you like. Raises what storage raises.
        """
        before = self._current
        files = self._storage.files()
        if self._anchor_is_shorter(files):
            self._take_anchor(files)
        self._follow(files)
        newest = max((file.number for file in files), default=-1)
        if newest > (-1 if self.version is None else self.version) and self._take_anchor(files):
            self._follow(files)
        return self._current is not before

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
        if file in self._passed_over:
            return False
        try:
            self._require_short(file.nbytes)
            found = self._taken(file, self._storage.read(file))
        except FileNotFoundError:  # deleted meanwhile
            return False
        except DamagedError as error:
            self._pass_over(file, error)
            return False
        if found is not None:
            self._current = found
        return found is not None

    def _require_short(self, nbytes: int) -> None:
        if self._most_nbytes is not None and nbytes > self._most_nbytes:
            raise DamagedError(f"its {nbytes} bytes are more than the {self._most_nbytes} that it can need")

    def _taken(self, file: File, content: bytes) -> tuple[VersionId, dict[str, Tensor]] | None:
        """Return a version and its tensors; None for a patch of other weights, which a new writer has made."""
        self._require_short(len(content))
        version, entries, body = decode(content)
        if version.number != file.number or bool(version.previous) != (file.kind == "patch"):
            raise DamagedError("it has the name of another")
        if self._like is not None and [(each.name, each.dtype, each.shape) for each in entries] != self._like:
            raise DamagedError("it has other tensors than those expected")
        if file.kind == "anchor":
            return version, anchored(entries, body)
        current, tensors = self._current
        if current is None or version.previous != current.state:
            return None
        return version, patched(entries, body, tensors)

    def _pass_over(self, file: File, error: DamagedError) -> None:
        self._passed_over.add(file)
        if file.name not in self.damaged:
            self.damaged.append(file.name)
            _log.warning("%s in %s is passed over: %s", file.name, self._storage.address, error)
