# SPDX-License-Identifier: Apache-2.0
"""Weights as files: a reader has the bits of a version that was written, or none, whatever dies or is damaged."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commopt import ConfigurationError, UnsupportedTensorError
from commopt.patches import Reader, Writer
from commopt.patches.encoding import DamagedError, decode, longest_nbytes
from commopt.patches.storage import File, Folder, Remote, Storage, storage_at

Tensors = dict[str, Tensor]


def weights(version: int, numel: int = 50) -> Tensors:
    """Return what a version has: all dtypes, of which some change a little, some at times and some never."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=draws)
    moved = start + 1e-3 * version * torch.randn(numel, generator=draws)
    return {
        "layer.weight": moved.bfloat16().view(-1, 5),
        "half": moved[:7].half(),
        "bias": moved[: 3 + 0 * version],
        "one of a row": moved[:10].view(2, 5)[:1, 2],
        "steps": torch.tensor(version // 2),
        "mask": torch.tensor([True, version % 3 == 0]),
        "none": torch.empty(0, 4),
    }


def same(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and repr(one[name].tolist()) == repr(other[name].tolist())
        for name in one
    )


@pytest.fixture(params=["folder", "fsspec"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "weights")
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path}/weights"


# ------------------------------------------------------------------------------------------- following


def test_a_reader_has_the_bits_of_every_version(address: str) -> None:
    writer, reader = Writer(address, anchor_every=3), Reader(address)
    assert not reader.update()
    assert reader.version is None
    for version in range(8):
        assert writer.write(weights(version)) == version == writer.version
        assert reader.update()
        assert not reader.update()
        assert reader.version == version
        assert same(reader.tensors, weights(version))
        assert same(Reader(address).tensors, {})
    late = Reader(address, like=weights(0))
    assert late.update()
    assert late.version == 7
    assert same(late.tensors, weights(7))
    assert reader.damaged == late.damaged == []


@pytest.mark.parametrize("joins", range(12))
@pytest.mark.parametrize("keep", [None, 1, 2])
def test_a_reader_that_missed_some_catches_up(address: str, joins: int, keep: int | None) -> None:
    writer, reader = Writer(address, anchor_every=4, keep_anchors=keep), Reader(address)
    for version in range(12):
        writer.write(weights(version))
        if version in (1, joins):
            reader.update()
            assert reader.version == version
            assert same(reader.tensors, weights(version))
    reader.update()
    assert reader.version == 11
    assert same(reader.tensors, weights(11))


def test_patches_are_short_and_old_files_go(tmp_path: Path) -> None:
    writer = Writer(tmp_path, anchor_every=10, keep_anchors=2)
    start = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 0.05
    for version in range(35):
        writer.write({"w": (start + 1e-5 * version).bfloat16(), "same": start})
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    anchors = sorted(name for name in sizes if name.endswith("anchor"))
    assert anchors == ["000000000020.anchor", "000000000030.anchor"]
    assert min(sizes) == "000000000020.anchor"
    assert max(nbytes for name, nbytes in sizes.items() if name.endswith("patch")) < 0.1 * 200_000
    assert all(sizes[name] < 600_000 + 1000 for name in anchors)


def test_tensors_that_a_user_holds_stay_as_they_are(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    values = weights(0)
    writer.write(values)
    reader.update()
    held = reader.tensors
    for each in values.values():  # the writer has its own copy
        each.zero_()
    writer.write(weights(1))
    reader.update()
    assert same(held, weights(0))
    assert same(reader.tensors, weights(1))


def test_a_model_is_followed(tmp_path: Path) -> None:
    model, other = nn.Linear(30, 20).bfloat16(), nn.Linear(30, 20).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    writer, reader = Writer(tmp_path), Reader(tmp_path, like=other.state_dict())
    for _ in range(5):
        model(torch.ones(1, 30).bfloat16()).float().square().sum().backward()
        optimizer.step()
        writer.write(model.state_dict())
        if reader.update():
            other.load_state_dict(reader.tensors)
        assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_other_tensors_begin_with_an_anchor(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    for version, tensors in enumerate(
        (weights(0), weights(1), weights(1, 60), {"x": torch.ones(2)}, {"y": torch.ones(2)})
    ):
        writer.write(tensors)
        reader.update()
        assert reader.version == version
        assert same(reader.tensors, tensors)


# ------------------------------------------------------------------------------------------- what dies


class Killed(Exception):
    """The writer is dead."""


class Dying:
    """Writes into a place, until so many bytes are written and so many files have got their names."""

    def __init__(self, storage: Storage, budget: int) -> None:
        self._storage = storage
        self._budget = budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write(self, file: File, content: bytes) -> None:
        """As of a folder: unfinished, whole but without its name, with it; elsewhere a part has the name."""
        written, self._budget = min(self._budget, len(content)), self._budget - len(content) - 1
        if self._budget >= 0:
            return self._storage.write(file, content)
        name = file.name
        if isinstance(self._storage, Folder):
            self._storage._path.mkdir(parents=True, exist_ok=True)
            (self._storage._path / f"{name}.0123abcd.unfinished").write_bytes(content[:written])
        elif written:
            assert isinstance(self._storage, Remote)
            self._storage._fs.pipe_file(self._storage._at(file), content[:written])
        raise Killed


def killed_at(budget: int, address: str, patch: pytest.MonkeyPatch) -> bool:
    """Write five versions, kill the writer, go on with another; return whether the first one lived to its end."""
    written: dict[int, Tensors] = {}
    follower, now_and_then = Reader(address), Reader(address)

    def look(*readers: Reader) -> None:
        for reader in readers:
            reader.update()
            assert reader.version is None or same(reader.tensors, written[reader.version])

    lived, after = True, 0
    place_of = storage_at
    with patch.context() as dying:
        dying.setattr("commopt.patches.writer.storage_at", lambda place: Dying(place_of(place), budget))
        writer = Writer(address, anchor_every=2)
        try:
            for step in range(5):
                number = (writer.version if writer.version is not None else -1) + 1
                written[number] = weights(step)
                writer.write(weights(step))
                look(follower)
        except Killed:
            lived = False
    look(follower, now_and_then)
    again = Writer(address, anchor_every=2)
    for step in range(3):
        after = 1 + (-1 if again.version is None else again.version)
        written[after] = weights(10 + step)
        assert again.write(weights(10 + step)) == after
        fresh = Reader(address)
        look(follower, fresh)
        assert (
            follower.version == fresh.version == after
        )  # the first file of a new writer is an anchor: nothing is lost
    look(now_and_then)
    assert now_and_then.version == after
    return lived


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 97])
def test_a_writer_may_be_killed_at_every_byte(address: str, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(logging.getLogger("commopt"), "disabled", True)
    budget = 0
    while not killed_at(budget, f"{address}{budget}", monkeypatch):
        budget += stride
    assert budget > 3000


def test_no_part_of_a_file_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for version in range(2):
        writer.write(weights(version))
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        decode(content)
        for nbytes in range(len(content)):
            with pytest.raises(DamagedError):
                decode(content[:nbytes])


WRITES = """
import sys, torch
from commopt.patches import Writer
from tests.test_patches import weights
writer = Writer(sys.argv[1], anchor_every=5, keep_anchors=2)
while True:
    version = (-1 if writer.version is None else writer.version) + 1
    writer.write(weights(version, 50_000))
"""


def test_a_reader_beside_writers_that_are_killed_never_has_a_wrong_weight(tmp_path: Path) -> None:
    reader, seen = Reader(tmp_path), 0
    for number in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], cwd=Path(__file__).parents[1])
        began, goal = reader.version or 0, 8 + number
        deadline = time.monotonic() + 60
        while (reader.version or 0) < began + goal and time.monotonic() < deadline:
            if reader.update():
                seen += 1
                assert reader.version is not None
                assert same(reader.tensors, weights(reader.version, 50_000))
        process.kill()
        process.wait()
        assert (reader.version or 0) >= began + goal
    assert seen > 5
    assert reader.damaged == []


def test_a_writer_whose_storage_fails_goes_on_with_an_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    writer.write(weights(0))
    with monkeypatch.context() as full:
        full.setattr(Folder, "write", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space"):
            writer.write(weights(1))
    reader.update()
    assert reader.version == 0
    number = writer.write(weights(2))
    reader.update()
    assert (tmp_path / f"{number:012d}.anchor").exists()
    assert same(reader.tensors, weights(2))


FULL = """
import resource, signal, sys
import torch
from commopt.patches import Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = Writer(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for _ in range(3):
    try:
        writer.write({"w": torch.ones(1000)})
    except OSError:
        continue
    raise AssertionError
"""


def test_a_full_disk_is_not_filled_with_what_is_unfinished(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_synchronised_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems."""
    fsync = os.fsync

    def refuse_folders(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    writer = Writer(tmp_path)
    assert [writer.write(weights(step)) for step in range(2)] == [0, 1]
    assert {path.suffix for path in tmp_path.iterdir()} == {".anchor", ".patch"}


def test_a_new_writer_removes_what_a_killed_one_left_long_ago_and_nothing_else(tmp_path: Path) -> None:
    names = ("000000000001.patch.0123abcd.unfinished", "000000000002.patch.4567abcd.unfinished", "my.unfinished")
    for name, age_s in zip(names, (7200, 10, 7200), strict=True):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    Writer(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


def test_two_writers_at_one_address_mix_no_weights(tmp_path: Path) -> None:
    one, reader, written = Writer(tmp_path, anchor_every=4), Reader(tmp_path), []
    one.write(weights(0))
    reader.update()
    two = Writer(tmp_path, anchor_every=4)
    for step in range(12):
        for writer, first in ((one, 0), (two, 100)):
            written.append(weights(first + step))
            writer.write(written[-1])
            for each in (reader, Reader(tmp_path)):
                each.update()
                assert any(same(each.tensors, values) for values in (weights(0), *written))


# ------------------------------------------------------------------------------------------- what begins anew


def emptied(address: str) -> None:
    """Remove all files."""
    place = storage_at(address)
    for file in place.files():
        place.delete(file)


@pytest.mark.parametrize(("had", "has"), [(7, 0), (7, 3), (7, 7), (7, 9), (2, 9), (0, 0)])
def test_a_reader_follows_into_a_folder_that_began_anew(
    had: int, has: int, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it looks while the folder has fewer versions, as many or more; of anchors it may have a higher number."""
    for keep, looks in ((None, True), (2, False)):
        emptied(address)
        writer, reader = Writer(address, anchor_every=4, keep_anchors=keep), Reader(address, like=weights(0))
        for version in range(had + 1):
            writer.write(weights(version))
        reader.update()
        assert reader.version == had
        emptied(address)
        assert not reader.update()
        writer = Writer(address, anchor_every=100 if looks else 4, keep_anchors=keep)
        caplog.clear()
        for version in range(has + 1):
            writer.write(weights(50 + version))
            if looks or version == has:
                assert reader.update()
                assert reader.version == version
                assert same(reader.tensors, weights(50 + version))
        assert caplog.text.count("begins anew") == 1
        assert not reader.update()
        assert reader.damaged == []


def test_a_patch_of_another_writer_tells_that_the_folder_began_anew(tmp_path: Path) -> None:
    """Also where the place tells neither lengths nor times, and so not that the file of this version is another."""
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    silent(reader)
    for version in range(6):
        writer.write(weights(version))
    reader.update()
    emptied(str(tmp_path))
    writer = Writer(tmp_path)
    for version in range(10):
        writer.write(weights(50 + version))
    assert reader.update()
    assert reader.version == 9
    assert same(reader.tensors, weights(59))


def counted(reader: Reader) -> list[File]:
    """Return the files that a reader reads from now on, as it does."""
    read, files = reader._storage.read, []

    def counts(file: File) -> bytes:
        files.append(file)
        return read(file)

    reader._storage.read = counts  # type: ignore[method-assign]
    return files


def silent(reader: Reader) -> None:
    """Show a reader files without lengths and stamps."""
    files = reader._storage.files
    reader._storage.files = lambda: [File(file.number, file.kind) for file in files()]  # type: ignore[method-assign]


def test_a_writer_that_goes_on_further_back_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user removes the last versions, and trains again from the one before."""
    writer, reader = Writer(tmp_path, anchor_every=3), Reader(tmp_path)
    for version in range(6):
        writer.write(weights(version))
    reader.update()
    for version in (4, 5):
        (tmp_path / f"{version:012d}.patch").unlink()
    writer = Writer(tmp_path)
    assert writer.write(weights(60)) == 4
    assert reader.update()
    assert reader.version == 4
    assert same(reader.tensors, weights(60))
    assert "from version 5 to version 4 of a writer that began with 4" in caplog.text


@pytest.mark.parametrize("writers", [1, 2])
def test_a_reader_never_goes_back_in_one_training(writers: int, address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a listing leaves out: the newest files, as one that lags, or any others. It costs one look at most."""
    writer, number = Writer(address, anchor_every=2), -1
    for each in range(writers):
        writer = writer if each == 0 else Writer(address, anchor_every=2)
        for _ in range(4):
            number = writer.write(weights(number + 1))
    reader = Reader(address)
    reader.update()
    reads, files = counted(reader), reader._storage.files()
    for left in range(len(files)):
        for shown in (files[:left], files[:left] + files[left + 1 :], files[left : left + 1], []):
            reader._storage.files = lambda shown=shown: shown  # type: ignore[method-assign, misc]
            before = len(reads)
            assert [reader.update() for _ in range(5)] == [False] * 5
            assert len(reads) <= before + 1
    assert reader.version == number
    assert same(reader.tensors, weights(number))
    assert "anew" not in caplog.text
    assert reader.damaged == []


def test_a_listing_of_the_training_before_leads_nowhere(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path / "old", anchor_every=2), Reader(tmp_path / "here")
    for version in range(6):
        writer.write(weights(version))
    (tmp_path / "old").rename(tmp_path / "here")
    reader.update()
    (tmp_path / "here").rename(tmp_path / "old")
    writer = Writer(tmp_path / "here", anchor_every=100)
    for version in range(2):
        writer.write(weights(50 + version))
    assert reader.update()
    (tmp_path / "here").rename(tmp_path / "new")
    (tmp_path / "old").rename(tmp_path / "here")
    assert not reader.update()
    assert reader.version == 1
    assert same(reader.tensors, weights(51))
    (tmp_path / "here").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "here")
    writer.write(weights(52))
    assert reader.update()
    assert same(reader.tensors, weights(52))


def test_files_that_name_no_writer_are_of_one(tmp_path: Path) -> None:
    """As those that were written before files named it: a reader does not go back, but into a folder begun anew."""
    writer, reader = Writer(tmp_path, anchor_every=2), Reader(tmp_path)
    writer._name = ""
    for version in range(6):
        writer.write(weights(version))
    reader.update()
    (tmp_path / "000000000005.patch").unlink()
    assert not reader.update()
    assert reader.version == 5
    emptied(str(tmp_path))
    Writer(tmp_path).write(weights(50))
    assert reader.update()
    assert same(reader.tensors, weights(50))


@pytest.mark.parametrize("place", ["folder", "fsspec", "a folder that tells no lengths and times"])
def test_a_file_that_was_damaged_is_read_once_it_is_whole(place: str, tmp_path: Path) -> None:
    """Also of the same length, as anchors have. Before that it is read once, unless nothing tells that it changed."""
    address = f"memory://{tmp_path}/weights" if place == "fsspec" else str(tmp_path)
    if place == "fsspec":
        pytest.importorskip("fsspec")
    Writer(address).write(weights(1))
    storage, file = storage_at(address), File(0, "anchor")
    whole = storage.read(file)
    storage.write(file, whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    reader = Reader(address)
    if place.startswith("a folder"):
        silent(reader)
    reads = counted(reader)
    for _ in range(3):
        assert not reader.update()
    assert len(reads) == (3 if place.startswith("a folder") else 1)
    storage.write(file, whole)
    if place == "folder":
        os.utime(tmp_path / file.name, (1, 1))
    assert reader.update()
    assert same(reader.tensors, weights(1))
    assert reader.damaged == ["000000000000.anchor"]


def test_a_file_that_is_gone_is_forgotten(address: str) -> None:
    writer, reader = Writer(address, anchor_every=2, keep_anchors=1), Reader(address)
    for version in range(9):
        writer.write(weights(version))
        reader.update()
    assert set(reader._known) <= set(storage_at(address).files())


# ------------------------------------------------------------------------------------------- what a user changes


def in_place(now: Tensors, before: Tensors) -> None:
    now["moved"].add_(1)


def in_inference_mode(now: Tensors, before: Tensors) -> None:
    with torch.inference_mode():
        now["moved"].mul_(2)


def through_numpy(now: Tensors, before: Tensors) -> None:
    now["moved"].view(torch.int16).numpy()[0] += 1


def by_a_fused_optimizer(now: Tensors, before: Tensors) -> None:
    parameter = nn.Parameter(now["moved"])
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


def in_the_version_before(now: Tensors, before: Tensors) -> None:
    before["same"].add_(1)  # shared by both


@pytest.mark.parametrize(
    "change", [in_place, in_inference_mode, through_numpy, by_a_fused_optimizer, in_the_version_before]
)
def test_no_patch_is_applied_to_weights_that_were_changed(
    change: Callable[[Tensors, Tensors], None], address: str, caplog: pytest.LogCaptureFixture
) -> None:
    def tensors(version: int) -> Tensors:
        return {"moved": weights(version)["layer.weight"], "same": torch.ones(5)}

    writer, reader = Writer(address), Reader(address)
    before: Tensors = {}
    for version in range(5):
        writer.write(tensors(version))
        assert reader.update()
        assert same(reader.tensors, tensors(version))
        if version in (2, 3):
            change(reader.tensors, before)
        before = reader.tensors
    assert caplog.text.count("were changed in place") == 1
    assert reader.damaged == []


def test_changed_weights_stay_where_no_other_can_be_had(tmp_path: Path) -> None:
    """A reader does not go back for them, and follows again from the next anchor."""
    writer, reader = Writer(tmp_path, anchor_every=5), Reader(tmp_path)
    for version in range(4):
        writer.write(weights(version))
    reader.update()
    (tmp_path / "000000000002.patch").unlink()
    reader.tensors["bias"].zero_()
    versions = []
    for version in range(4, 8):
        writer.write(weights(version))
        reader.update()
        versions.append(reader.version)
    assert versions == [3, 5, 6, 7]
    assert same(reader.tensors, weights(7))


def test_the_dictionary_is_the_users(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    for version in range(3):
        writer.write(weights(version))
        assert reader.update()
        assert same(reader.tensors, weights(version))
        reader.tensors.clear()
        reader.tensors["layer.weight"].requires_grad_()
        reader.tensors["half"].unsqueeze_(0)
    assert reader.damaged == []


def test_a_reader_updates_inside_of_inference_mode_and_outside(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path), Reader(tmp_path)
    for version in range(4):
        writer.write(weights(version))
        with torch.inference_mode(version % 2 == 0):
            assert reader.update()
        assert same(reader.tensors, weights(version))


# ------------------------------------------------------------------------------------------- what is damaged


def flipped(content: bytes, stride: int) -> Iterator[bytes]:
    """Yield damaged contents: other bytes, and fewer."""
    for at in range(0, len(content), stride):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        yield content[:at]
    yield content + b"\0"


@pytest.mark.parametrize(
    "name", ["000000000002.patch", "000000000003.patch", "000000000003.anchor", "000000000000.anchor"]
)
def test_a_damaged_file_is_named_and_passed_over(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, follower = Writer(tmp_path, anchor_every=3), Reader(tmp_path)
    for version in range(2):
        writer.write(weights(version))
    follower.update()
    for version in range(2, 5):
        writer.write(weights(version))
    whole = (tmp_path / name).read_bytes()
    for content in flipped(whole, 37):
        (tmp_path / name).write_bytes(content)
        late, here = Reader(tmp_path), Reader(tmp_path)
        here._current = follower._current
        caplog.clear()
        late.update()
        here.update()
        for reader in (late, here):
            assert reader.version is not None
            assert same(reader.tensors, weights(reader.version))
            assert reader.damaged in ([], [name])
            assert not reader.damaged or name in caplog.text
        # The follower needs the patches, until an anchor; who joins late needs an anchor, and the patches behind it.
        assert here.version == 4
        assert late.version == 4
    (tmp_path / name).write_bytes(whole[:-1])
    for version in range(5, 8):
        writer.write(weights(version))
        follower.update()
    assert follower.version == 7


def test_the_last_patch_is_damaged_and_the_next_anchor_has_it(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path, anchor_every=4), Reader(tmp_path)
    versions = []
    for version in range(9):
        writer.write(weights(version))
        if version == 5:
            (tmp_path / "000000000005.patch").write_bytes(b"commopt weights 1\n and no more")
        reader.update()
        versions.append(reader.version)
    assert versions == [0, 1, 2, 3, 4, 4, 4, 4, 8]
    assert reader.damaged == ["000000000005.patch"]
    assert same(reader.tensors, weights(8))


def forged(header: Any, body: bytes = b"") -> bytes:
    """Return a file with a right checksum."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = b"commopt weights 1\n" + len(text).to_bytes(8, "little") + text + body
    return content + sha256(content).digest()


FORGED: dict[str, bytes] = {
    "no json": forged(b"\x80\x04\x95."),
    "nested": forged(b"[" * 100_000),
    "huge number": forged(b'{"number": ' + b"9" * 5000 + b"}"),
    "no tensors": forged({"number": 0, "state": "a", "previous": ""}),
    "huge": forged(
        {"number": 0, "state": "a", "previous": "", "tensors": [["w", "float32", [2**40], "raw", 4 * 2**40]]}
    ),
    "negative": forged({"number": 0, "state": "a", "previous": "", "tensors": [["w", "float32", [-1], "raw", -4]]}),
    "both ways": forged(
        {
            "number": 0,
            "state": "a",
            "previous": "",
            "tensors": [["a", "int8", [5], "raw", 5], ["b", "int8", [-5], "raw", -5]],
        }
    ),
    "beyond counting": forged(
        {"number": 0, "state": "a", "previous": "", "tensors": [["w", "int8", [2**61, 2**61, 0], "raw", 0]]}
    ),
    "no dtype": forged({"number": 0, "state": "a", "previous": "", "tensors": [["w", "__class__", [1], "raw", 4]]}),
    "wide": forged({"number": 0, "state": "a", "previous": "", "tensors": [["w", "int8", [1] * 70, "raw", 1]]}, b"1"),
    "twice": forged({"number": 0, "state": "a", "previous": "", "tensors": [["w", "int8", [0], "raw", 0]] * 2}),
    "a patch": forged({"number": 0, "state": "a", "previous": "", "tensors": [["w", "int8", [9], "same", 0]]}),
    "truth": forged({"number": 0, "state": "a", "previous": "", "tensors": [["w", "bool", [1], "raw", 1]]}, b"\x07"),
    "another number": forged({"number": 7, "state": "a", "previous": "", "tensors": []}),
    "no header": b"commopt weights 1\n" + (2**62).to_bytes(8, "little"),
    "long header": forged(b"")[:18] + b"\xff" * 8 + sha256(forged(b"")[:18] + b"\xff" * 8).digest(),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_is_named_and_takes_no_memory(case: str, tmp_path: Path) -> None:
    (tmp_path / "000000000000.anchor").write_bytes(FORGED[case])
    reader = Reader(tmp_path)
    assert not reader.update()
    assert reader.damaged == ["000000000000.anchor"]
    assert reader.tensors == {}


def test_a_forged_difference_changes_nothing(tmp_path: Path) -> None:
    Writer(tmp_path).write({"w": torch.ones(64, dtype=torch.bfloat16)})
    reader = Reader(tmp_path)
    reader.update()
    state, message = reader._current[0].state, (2 * 64 + 1).to_bytes(8, "little") + (40).to_bytes(8, "little")  # type: ignore[union-attr]
    header = {"number": 1, "state": "b", "previous": state, "tensors": [["w", "bfloat16", [64], "difference", 40]]}
    (tmp_path / "000000000001.patch").write_bytes(forged(header, message + b"\xff" * 24))
    assert not reader.update()
    assert reader.damaged == ["000000000001.patch"]
    assert bool((reader.tensors["w"] == 1).all())


def test_with_like_other_files_are_not_read(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(weights(0))
    long = longest_nbytes(weights(0))
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= long
    reader = Reader(tmp_path, like=weights(0, 60))
    assert not reader.update()
    assert reader.damaged == ["000000000000.anchor"]
    (tmp_path / "000000000001.anchor").write_bytes(b"x" * (long + 1))
    reader = Reader(tmp_path, like=weights(0))
    assert reader.update()
    assert reader.damaged == ["000000000001.anchor"]
    assert same(reader.tensors, weights(0))


def test_the_order_of_like_does_not_count(tmp_path: Path) -> None:
    Writer(tmp_path).write(weights(0))
    reader = Reader(tmp_path, like=dict(reversed(weights(0).items())))
    assert reader.update()
    assert same(reader.tensors, weights(0))


# ------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path / "weights")
    for values in (
        {"w": 3},
        {"w": torch.ones(2).to_sparse()},
        {1: torch.ones(1)},
        {"w": torch.ones(2, dtype=torch.complex128)},
    ):
        with pytest.raises(UnsupportedTensorError, match=r"is a |which has no form"):
            writer.write(values)  # type: ignore[arg-type]
    assert writer.version is None
    for options in ({"anchor_every": 0}, {"anchor_every": 2.5}, {"keep_anchors": True}, {"keep_anchors": 0}):
        with pytest.raises(ConfigurationError, match="no positive whole number"):
            Writer(tmp_path, **options)
    (tmp_path / "file").write_text("")
    for make, words in (
        (lambda: Reader(tmp_path / "file"), "give the folder"),
        (lambda: Writer(""), "no folder and no address"),
        (lambda: Reader(tmp_path, like={"w": 1}), "wants tensors by name"),  # type: ignore[dict-item]
        (lambda: Reader("nosuch://there/is"), "fsspec cannot open nosuch://there/is"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            make()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigurationError, match="pip install fsspec, and the package"):
        Reader("s3://bucket/run")
    Writer(tmp_path / "plain").write(weights(0))
    with suppress(FileNotFoundError):
        os.unlink(tmp_path / "file")
