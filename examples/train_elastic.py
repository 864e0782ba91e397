# SPDX-License-Identifier: Apache-2.0
"""Learn scikit-learn's handwritten digits with ranks that die and come: in process, or with torchrun's elastic agent.

In process, ranks that are left go on within seconds from what they have in memory, and others join at a checkpoint:

    python -m examples.train_elastic --ranks 4 --kill 2:30 --join 60 --folder digits

This starts four processes, of which number 2 is killed in step 30, and a fifth one that joins from step 60 on. Under
torchrun, whose agents start all processes again when one dies, they go on from the last checkpoint, with as many ranks
as there are then:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        -m examples.train_elastic --folder /shared/digits
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commopt
from examples.train_digits import build_model, load_images

HOOK = "quantized:bits=4"
TIMEOUT = timedelta(seconds=60)
SETTLED_S = 2.0  # after which nobody else comes: commopt tells all survivors of a failure within that


class Training:
    """A model, its optimizer and what commopt keeps for it; `begin` in a process group, `step`, `save`."""

    def __init__(self, options: argparse.Namespace, name: int) -> None:
        torch.manual_seed(0)
        self.options, self.name = options, name  # of the process: it stays when ranks change
        self.module = build_model()
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.05, momentum=0.9)
        (self.images, self.labels), self.held_out = load_images()
        self.ddp: DistributedDataParallel | None = None
        self.comm: commopt.CommState | None = None
        self.steps = 0
        self.file = Path(options.folder, "digits.pt")

    def begin(self) -> None:
        """Begin in the process group of now: at the checkpoint, if there is one."""
        saved = commopt.load_checkpoint(self.file)
        if saved is not None:
            self.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.ddp = DistributedDataParallel(self.module)
        self.comm = commopt.attach(self.ddp, HOOK)
        if saved is not None:
            self.comm.load_state_dict(saved["comm"])  # of any number of ranks
        self._say("begins" if saved is None else "goes on from a checkpoint")

    def rebuild(self) -> None:
        """Go on in the process group of now, which survivors have made."""
        assert self.comm is not None
        self.ddp = DistributedDataParallel(self.module)  # which gives all ranks the parameters of the first
        self.comm = commopt.rebuild(self.comm, self.ddp)
        self._say("goes on from memory")

    def _say(self, what: str) -> None:
        assert self.comm is not None
        self.steps = self.comm.stats()["steps"]
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks: {what} after step {self.steps}, loss {self.loss():.3f}", flush=True)

    def step(self) -> None:
        """Do one optimizer step; raises when a peer is gone."""
        assert self.ddp is not None
        shuffle = torch.Generator().manual_seed(1000 * self.steps + dist.get_rank())
        chosen = torch.randint(len(self.images), (16,), generator=shuffle)
        loss = cross_entropy(self.ddp(self.images[chosen]), self.labels[chosen])
        if self.options.kill == (self.name, self.steps):
            next(self.module.parameters()).register_hook(_kill_this_process)  # in the middle of backward
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()  # right behind backward: what has arrived on this rank is in the parameters
        self.steps += 1
        time.sleep(self.options.pause)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the loss of the images that were held out."""
        images, labels = self.held_out
        return float(cross_entropy(self.module(images), labels))

    def save(self) -> None:
        """Write a checkpoint that fits any number of ranks; every rank must call it."""
        assert self.comm is not None
        kept = self.comm.gathered_state_dict()
        if dist.get_rank() == 0:
            model, optimizer = self.module.state_dict(), self.optimizer.state_dict()
            commopt.save_checkpoint({"model": model, "optimizer": optimizer, "comm": kept}, self.file)
        dist.barrier()


def _kill_this_process(gradient: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------- with torchrun


def train_under_torchrun(options: argparse.Namespace) -> None:
    """Train from the last checkpoint on; an exception ends this process, and the agent begins anew with all it has."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    training = Training(options, dist.get_rank())
    training.begin()
    while training.steps < options.steps:
        training.step()
        if training.steps % options.every == 0:
            training.save()
    training._say("done")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- in process


def members_of(store: dist.Store, world: int, name: int, expected: int = 0) -> list[int]:
    """Return the names of the processes that are in a world, the same list on all: those that came while others did.

    expected: how many come; 0 for those that come until nobody has come for SETTLED_S.
    """
    number = store.add(f"{world}/count", 1)
    store.set(f"{world}/member {number}", str(name))
    seen, since = 0, time.monotonic()
    while not store.check([f"{world}/list"]):
        count = store.add(f"{world}/count", 0)
        if count != seen:
            seen, since = count, time.monotonic()
        elif count == expected or (not expected and time.monotonic() - since > SETTLED_S):
            names = sorted(int(store.get(f"{world}/member {number}")) for number in range(1, count + 1))
            store.compare_set(f"{world}/list", "", " ".join(map(str, names)))  # the first to write decides
        time.sleep(0.02)
    names = [int(each) for each in store.get(f"{world}/list").split()]
    if name not in names:
        sys.exit(f"process {name} came too late for world {world}, which is {names}")
    return names


def enter(store: dist.Store, world: int, name: int, members: Sequence[int]) -> None:
    """Make the process group of a world. Its keys have a prefix of their own: those of earlier ones are still there."""
    place = dist.PrefixStore(f"world {world}", store)
    dist.init_process_group("gloo", store=place, rank=members.index(name), world_size=len(members), timeout=TIMEOUT)


def newcomers(store: dist.Store, world: int, invited: int) -> int:
    """Return how many have ever come to join, as the first rank sees it, which invites those that wait to a world."""
    waiting = torch.tensor([store.add("waiting", 0) if dist.get_rank() == 0 else 0])
    dist.broadcast(waiting, 0)
    if dist.get_rank() == 0:
        for number in range(invited + 1, int(waiting) + 1):
            store.set(f"invitation {number}", f"{world} {int(waiting)}")
    return int(waiting)


def train_in_process(name: int, port: int, options: argparse.Namespace, joins: bool = False) -> None:
    """Train with whoever is there: without those that die, and from a checkpoint on with those that come."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)  # its host must outlive all ranks
    training, world, invited = Training(options, name), 0, 0
    if joins:
        number = store.add("waiting", 1)
        world, invited = map(int, store.get(f"invitation {number}").split())
        members = members_of(store, world, name)
    else:
        members = members_of(store, world, name, expected=options.ranks)
    enter(store, world, name, members)
    training.begin()
    while training.steps < options.steps:
        failure: Exception | None = None
        try:
            training.step()
            if training.steps % options.every == 0:
                training.save()
                coming = 0
                if options.join is not None and training.steps >= options.join:
                    coming = newcomers(store, world + 1, invited) - invited
                if coming:  # all leave this world, and meet those in the next
                    invited, world = invited + coming, world + 1
                    dist.destroy_process_group()
                    members = members_of(store, world, name)
                    enter(store, world, name, members)
                    training.begin()
        except Exception as error:
            if commopt.failure_of(error) is None:
                raise  # no peer was lost: it is an error of this program
            failure = error
        if failure is not None:
            print(f"process {name}: {str(failure).splitlines()[0]}", flush=True)
            started, world = time.monotonic(), world + 1
            dist.destroy_process_group()
            members = members_of(store, world, name)
            enter(store, world, name, members)
            training.rebuild()
            if dist.get_rank() == 0:
                print(f"went on within {time.monotonic() - started:.1f} s", flush=True)
    training._say("done")
    dist.destroy_process_group()


def launch(options: argparse.Namespace) -> None:
    """Start the processes, and hold the store, so that any of them may die."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")

    def start(name: int, **how: Any) -> Any:
        process = context.Process(target=train_in_process, args=(name, store.port, options), kwargs=how)
        process.start()
        return process

    processes = [start(name) for name in range(options.ranks)]
    if options.join is not None:
        processes.append(start(options.ranks, joins=True))
    for process in processes:
        process.join()
    if sum(process.exitcode != 0 for process in processes) > (options.kill is not None):
        sys.exit("more processes failed than were killed")


def main() -> None:
    """Train under torchrun, or start processes."""
    parser = argparse.ArgumentParser(description="Learn scikit-learn's digits with ranks that die and come.")
    parser.add_argument("--folder", required=True, help="for the checkpoint; seen by all ranks")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to kill ranks")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (not under torchrun)")
    parser.add_argument("--kill", metavar="PROCESS:STEP", help="one that is killed in the middle of a step")
    parser.add_argument("--join", type=int, metavar="STEP", help="start another process, which joins from STEP on")
    options = parser.parse_args()
    options.kill = tuple(map(int, options.kill.split(":"))) if options.kill else None
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train_under_torchrun(options)
    else:
        launch(options)


if __name__ == "__main__":
    main()
