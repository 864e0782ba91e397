# SPDX-License-Identifier: Apache-2.0
"""The ranks of one node: `node.py NODE_RANK RANKS_PER_NODE ADDRESS PORT [-m] SCRIPT ARGS...`, in torchrun's place.

They are forked from a process that has loaded torch: loading takes seconds of a processor, and emulated nodes share
processors. They find torchrun's variables, and its store at PORT of node 0, whose ADDRESS is given. Exits as the first
rank that fails, at once: who started it ends what is left of the node.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import time

_ATTEMPT = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def start(node_rank: int, ranks_per_node: list[int], address: str, port: int, command: list[str]) -> int:
    """Start the ranks and wait for all; return the exit status of the first that failed, as a shell has it."""
    import torch.distributed as dist

    first, count = sum(ranks_per_node[:node_rank]), ranks_per_node[node_rank]
    os.environ.update(_ATTEMPT, MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(sum(ranks_per_node)))
    os.environ.update(GROUP_RANK=str(node_rank), LOCAL_WORLD_SIZE=str(count))
    gc.freeze()  # else a rank looks through all that is loaded when it exits, and copies every page
    ranks: dict[int, int] = {}
    for place in range(count):
        if (pid := os.fork()) == 0:
            os.environ.update(RANK=str(first + place), LOCAL_RANK=str(place))
            _run(command)
            return 0
        ranks[pid] = first + place
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the ranks get it too
    # Only now: threads do not come through a fork.
    store = dist.TCPStore(address, port, is_master=node_rank == 0, wait_for_workers=False)
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            print(f"rank {rank} failed, the first of its node; exit code: {code}", file=sys.stderr)
            return code if code > 0 else 128 - code
    store.add("nodes that are done", 1)
    while node_rank == 0 and store.add("nodes that are done", 0) < len(ranks_per_node):
        time.sleep(0.02)  # their ranks may need the store
    return 0


def _run(command: list[str]) -> None:
    """Do what `python COMMAND...` does; what the script raises ends this process as it would end that one."""
    module = command[0] == "-m"
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(command[0]))
    sys.argv = command[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    node_rank, counts, address, port, *command = sys.argv[1:]
    sys.exit(start(int(node_rank), [int(count) for count in counts.split(",")], address, int(port), command))
