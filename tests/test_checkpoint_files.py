# SPDX-License-Identifier: Apache-2.0
"""Files of checkpoints: whatever byte a process is killed at, or bit has changed, the last whole one is read."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import commopt
from commopt import ConfigurationError
from commopt.checkpoint_files import claim, from_bytes, identity, load_checkpoint, save_checkpoint, to_bytes
from commopt.server.shared import require_saved
from tests.speed import limit

ROOT = Path(__file__).parents[1]
OLD, NEW = {"step": 1, "w": torch.zeros(8)}, {"step": 2, "w": torch.arange(8.0)}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="commopt")  # a warning for each of thousands of files


def is_new(found: Any) -> bool:
    return found["step"] == 2 and torch.equal(found["w"], NEW["w"])  # type: ignore[arg-type]


def two_files(folder: Path) -> tuple[Path, bytes]:
    """Return a checkpoint that has one before it, and its bytes."""
    path = folder / "training.pt"
    save_checkpoint(OLD, path)
    save_checkpoint(NEW, path)
    return path, path.read_bytes()


def test_a_checkpoint_is_a_file_of_torch(tmp_path: Path) -> None:
    path, _ = two_files(tmp_path)
    assert is_new(load_checkpoint(path))
    assert is_new(torch.load(path, weights_only=True))
    assert is_new(torch.load(path, weights_only=True, mmap=True))
    assert load_checkpoint(tmp_path / "training.pt.previous")["step"] == 1
    assert load_checkpoint(tmp_path / "none.pt") is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["training.pt", "training.pt.previous"]
    torch.save(NEW, path)  # has no checksum
    assert is_new(load_checkpoint(path))


def test_a_file_that_is_cut_at_any_byte_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    path, data = two_files(tmp_path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert load_checkpoint(path)["step"] == 1, length


def test_a_bit_that_has_changed_is_found_wherever_it_is(tmp_path: Path) -> None:
    """torch.load finds about a third: it compares no checksum of what is in its archive."""
    path, data = two_files(tmp_path)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        assert load_checkpoint(path)["step"] == 1, place


def test_bytes_of_a_part_are_as_safe() -> None:
    data = to_bytes(NEW)
    assert is_new(from_bytes(data, "a part"))
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        with pytest.raises(ConfigurationError, match="a part cannot be read: it"):
            from_bytes(bytes(changed), "a part")


def test_what_is_damaged_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="commopt")
    path, data = two_files(tmp_path)
    path.write_bytes(data[:-1])
    load_checkpoint(path)
    assert f"{path} cannot be read: it is incomplete, or no checkpoint. Going on from the one before, " in caplog.text
    (tmp_path / "training.pt.previous").write_bytes(b"")
    with pytest.raises(
        ConfigurationError, match=r"No whole training.pt.previous is there; move the file away to start"
    ):
        load_checkpoint(path)


def test_a_save_after_damage_leaves_a_whole_file_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = two_files(tmp_path)
    path.write_bytes(data[:100])
    replace, seen = Path.replace, list[int]()

    def look(self: Path, target: Path) -> Path:
        seen.append(load_checkpoint(path)["step"])
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    save_checkpoint(NEW, path)
    assert seen == [1, 2]
    assert is_new(load_checkpoint(path))


# ------------------------------------------------------------------------------------- killed, full, several

KILLED = """
import os, resource, signal, sys
from pathlib import Path
import torch
from commopt.checkpoint_files import load_checkpoint, save_checkpoint

path, stride = Path(sys.argv[1]), int(sys.argv[2])
new = {"step": 2, "w": torch.arange(8.0)}
save_checkpoint({"step": 1, "w": torch.zeros(8)}, path)
length = path.stat().st_size
calls = ("fsync", "link", "replace", "close")


def end(place, call):
    # In a child: die when the file has `place` bytes, by the kernel, or just before or after one of the system calls.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if place >= 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (place, place))
    for name, number, after in [call] if call else ():
        real, count = getattr(os, name), [0]

        def dies(*arguments, **options):
            count[0] += 1
            if count[0] == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            found = real(*arguments, **options)
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        setattr(os, name, dies)
    save_checkpoint(new, path)
    os._exit(0)


deaths, last = 0, 1
points = [(place, None) for place in range(0, length + 1, stride)]
points += [(-1, (name, number, after)) for name in calls for number in (1, 2) for after in (False, True)]
for place, call in points:
    child = os.fork()
    if child == 0:
        end(place, call)
    status = os.waitpid(child, 0)[1]
    deaths += os.WIFSIGNALED(status)
    found = load_checkpoint(path)
    whole = {1: torch.zeros(8), 2: new["w"]}[found["step"]]
    assert torch.equal(found["w"], whole), (place, call)
    if os.WIFSIGNALED(status) and place >= 0:
        assert found["step"] == last, (place, found)
    last = found["step"]
    if last == 2:  # begin again
        for each in path.parent.iterdir():
            each.unlink()
        save_checkpoint({"step": 1, "w": torch.zeros(8)}, path)
        last = 1
save_checkpoint(new, path)
print(length, len(points), deaths, sorted(each.name for each in path.parent.iterdir()))
"""


def test_a_process_that_is_killed_at_any_byte_leaves_the_last_whole_file(tmp_path: Path) -> None:
    """The kernel kills it as soon as its file is as long as is allowed; and at each system call that gives a name.

    At every fifth byte; test_a_save_that_is_cut_at_any_byte has them all.
    """
    arguments = [sys.executable, "-c", KILLED, str(tmp_path / "training.pt"), "5"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=limit(240), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    length, points, deaths, names = done.stdout.split(maxsplit=3)
    assert int(points) > int(length) // 5 + 10
    assert int(deaths) >= int(length) // 5
    assert names.strip() == "['training.pt', 'training.pt.previous']"  # nothing of all the unfinished ones


CUT = """
import resource, sys
from pathlib import Path
import torch
from commopt.checkpoint_files import load_checkpoint, save_checkpoint

path = Path(sys.argv[1])
save_checkpoint({"step": 1, "w": torch.zeros(8)}, path)
new = {"step": 2, "w": torch.arange(8.0)}
length = path.stat().st_size
for place in range(length):
    resource.setrlimit(resource.RLIMIT_FSIZE, (place, resource.RLIM_INFINITY))
    try:
        save_checkpoint(new, path)
    except OSError:
        pass
    else:
        raise AssertionError(place)
    assert load_checkpoint(path)["step"] == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name], place
print(length)
"""


def test_a_save_that_is_cut_at_any_byte_leaves_the_last_whole_file(tmp_path: Path) -> None:
    """As on a full disk: the kernel writes so many bytes, and refuses the next."""
    arguments = [sys.executable, "-c", CUT, str(tmp_path / "training.pt")]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=limit(120), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1000


@pytest.mark.parametrize("where", ["torch", "sync"])
def test_a_full_disk_raises_and_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "training.pt"
    save_checkpoint(OLD, path)
    if where == "torch":
        monkeypatch.setattr("commopt.checkpoint_files._HashingFile.write", full_after_some)
    else:
        monkeypatch.setattr(os, "fsync", lambda handle: full())
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(NEW, path)
    assert [each.name for each in tmp_path.iterdir()] == ["training.pt"]
    assert load_checkpoint(path)["step"] == 1


def full() -> None:
    raise OSError(28, "No space left on device")


def full_after_some(self: Any, data: Any) -> int:
    self.error = OSError(28, "No space left on device")
    raise self.error


def test_two_that_write_one_path_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "training.pt", os.fsync
    save_checkpoint(OLD, path)

    def while_another_writes(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        save_checkpoint(NEW, path)

    monkeypatch.setattr(os, "fsync", while_another_writes)
    with pytest.raises(FileExistsError, match="another process at the same time: let one rank write it"):
        save_checkpoint({"step": 3}, path)
    assert is_new(load_checkpoint(path))


def test_who_takes_over_ends_a_save_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "training.pt", os.fsync
    assert claim(path) is None
    save_checkpoint(OLD, path)
    before = identity(path)

    def while_another_takes_over(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        assert claim(path) == before

    monkeypatch.setattr(os, "fsync", while_another_takes_over)
    with pytest.raises(FileExistsError, match="another process at the same time"):
        save_checkpoint(NEW, path)
    assert identity(path) != before
    assert load_checkpoint(path)["step"] == 1


@pytest.mark.parametrize("target", ["../big/training.pt", "nothing yet.pt"])
def test_of_a_link_the_file_is_written(tmp_path: Path, target: str) -> None:
    for name in ("big", "run"):
        (tmp_path / name).mkdir()
    link = tmp_path / "run" / "training.pt"
    link.symlink_to(target)
    file = link.resolve()
    save_checkpoint(OLD, link)
    save_checkpoint(NEW, link)
    assert link.is_symlink()
    assert is_new(load_checkpoint(file))
    assert sorted(each.name for each in file.parent.iterdir() if each != link) == [file.name, f"{file.name}.previous"]
    file.write_bytes(b"")
    assert load_checkpoint(link)["step"] == 1  # the one before is found by way of the link too


def test_two_paths_that_begin_alike_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, longer, fsync = tmp_path / "training.pt", tmp_path / "training.pt.best", os.fsync

    def while_another_writes(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        save_checkpoint(OLD, path)

    monkeypatch.setattr(os, "fsync", while_another_writes)
    save_checkpoint(NEW, longer)
    assert is_new(load_checkpoint(longer))
    assert load_checkpoint(path)["step"] == 1


JOB = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import commopt

path, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))
optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
saved = commopt.load_checkpoint(path)
if saved is not None:
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
ddp = DDP(module)
comm = commopt.attach(ddp, "quantized:bits=4", timeout=60)
if saved is not None:
    comm.load_state_dict(saved["comm"])
for step in range(comm.stats()["steps"], steps):
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    optimizer.zero_grad()
    ddp(batch).square().sum().backward()
    optimizer.step()
    kept = comm.gathered_state_dict()
    if dist.get_rank() == 0:
        whole = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "comm": kept}
        commopt.save_checkpoint(whole, path)
        print(step + 1, flush=True)
total = sum(int(p.detach().view(torch.int32).long().sum()) for p in module.parameters())
if dist.get_rank() == 0:
    print("bits", total, flush=True)
dist.destroy_process_group()
"""


def start(path: Path, steps: int) -> list[subprocess.Popen[str]]:
    """Start two ranks that save after every step."""
    from tests.frameworks import free_port

    port = str(free_port())
    processes = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-c", JOB, str(path), str(steps)]
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        processes.append(subprocess.Popen(arguments, cwd=ROOT, env=env, **pipe))
    return processes


def ended(processes: list[subprocess.Popen[str]]) -> str:
    said = processes[0].communicate(timeout=limit(120))[0]
    processes[1].communicate(timeout=limit(60))
    return said.split("bits ")[-1].strip()


def test_a_job_that_is_killed_while_it_saves_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = ended(start(tmp_path / "whole.pt", 12))
    path = tmp_path / "killed.pt"
    for seen, wait_s in ((2, 0.0), (5, 0.002), (9, 0.005)):
        processes = start(path, 10_000)
        assert processes[0].stdout is not None
        assert any(line.strip() == str(seen) for line in processes[0].stdout)
        time.sleep(wait_s)  # into the next step, or its save
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=limit(30))
        assert load_checkpoint(path)["comm"]["ranks"][0]["steps"] >= seen
    assert ended(start(path, 12)) == whole


# ------------------------------------------------------------------------------------- the server's


def test_the_servers_states_have_a_format() -> None:
    before = {"round": 3, "done": 1.0, "parameters": {"w": torch.ones(2)}, "momentum": {}}  # had no number
    assert require_saved(before) == (3, 1.0)
    assert require_saved({"format": 1, **before}) == (3, 1.0)
    for number, message in ((2, "which a newer commopt has written"), ("1", "format is '1'"), (0, "format is 0")):
        with pytest.raises(ConfigurationError, match=message):
            require_saved({"format": number, **before})


def test_the_names_are_public() -> None:
    assert commopt.save_checkpoint is save_checkpoint
    assert commopt.load_checkpoint is load_checkpoint
