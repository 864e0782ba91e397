# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two nodes on this machine, and a training in it: stock DDP beside a strategy.

    python -m bench.slurm --rate 200mbit --strategy hierarchical_quantized:bits=4

slurmctld, a slurmd for each node and munge run in the namespaces of an emulated cluster, with their files in a
temporary folder. It needs root and Slurm (apt-get install slurm-wlm munge); the machine's own Slurm stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.command_line import CommandParser, refuse
from commopt.errors import ConfigurationError

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "examples" / "launch"
_DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
_START_S = 60.0
_CONFIGURATION = """\
ClusterName=emulated
SlurmctldHost=node0(10.77.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
JobRequeue=1
NodeName=node[0-{last}] CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


class EmulatedSlurm:
    """A Slurm whose nodes are those of an emulated cluster, called node0, node1, ...

    nodes, rate: as of EmulatedCluster.
    cpus: of each node, as Slurm counts them.
    """

    def __init__(self, nodes: int = 2, rate: str = "none", cpus: int = 8) -> None:
        self.cluster = EmulatedCluster(nodes=nodes, ranks_per_node=1, rate=rate)
        self._nodes, self._cpus = nodes, cpus
        self._stack = ExitStack()
        self.folder = Path()

    @staticmethod
    def missing() -> str | None:
        """Return the reason why this machine cannot run it, None if it can."""
        absent = [tool for tool in _DAEMONS if shutil.which(tool) is None]
        if absent:
            return f"no {', '.join(absent)} on PATH; apt-get install slurm-wlm munge"
        return EmulatedCluster.missing()

    def __enter__(self) -> EmulatedSlurm:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            stack.enter_context(self.cluster)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, last=self._nodes - 1, cpus=self._cpus))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # wanted, and with these plugins not used
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file")]
        munge += [f"--seed-file={folder}/munge.seed", f"--key-file={key}", "--foreground", "--force"]
        self._daemon(0, ["munged", *munge])
        self._daemon(0, ["slurmctld", "-D"])
        for node in range(self._nodes):
            (folder / f"spool-node{node}").mkdir()
            hidden = "mount -t tmpfs none /sys/fs/cgroup"  # the host's are not its own
            self._daemon(node, ["bash", "-c", f"{hidden} && exec slurmd -D -N node{node}"])
        deadline = time.monotonic() + _START_S
        while self.call(["sinfo", "-h", "-o", "%T %D"]).stdout.strip() != f"idle {self._nodes}":
            if time.monotonic() > deadline:
                logs = "".join(each.read_text()[-2000:] for each in sorted(folder.glob("*.log")))
                raise ClusterUnavailableError(f"Slurm did not start within {_START_S:g} s: {logs}")
            time.sleep(0.2)

    def _daemon(self, node: int, command: Sequence[str]) -> None:
        """Start a program that ends with the cluster."""
        with (self.folder / "daemons.log").open("a") as log:
            subprocess.Popen(self._on(node, command), env=self._environment(), stdout=log, stderr=log, stdin=-3)

    def _on(self, node: int, command: Sequence[str]) -> list[str]:
        named = ["unshare", "--uts", "--mount", "bash", "-c", f'hostname node{node} && exec "$@"', "bash", *command]
        return self.cluster._network.enter(node, named)

    def _environment(self, **variables: str) -> dict[str, str]:
        """Return the environment without a surrounding job's or launcher's variables."""
        foreign = re.compile(r"(SLURM|SBATCH|OMPI|PMI|NCCL|GLOO|COMMOPT)_|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)$")
        kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}

    def call(
        self, command: Sequence[str], timeout_s: float = 300.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's on node 0, from the temporary folder."""
        environment = self._environment(PATH=self._path(), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **(env or {}))
        return subprocess.run(
            self._on(0, command),
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def _path(self) -> str:
        """Return a PATH on which python, torchrun and commopt are those of this environment."""
        folder = self.folder / "bin"
        if not folder.exists():
            folder.mkdir()
            modules = {"python": "", "torchrun": "-m torch.distributed.run ", "commopt": "-m commopt "}
            for name, module in modules.items():
                (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
                (folder / name).chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    def batch(self, options: Sequence[str], job: Path, *arguments: str, **env: str) -> tuple[int, str]:
        """Submit a job file and wait for its end. Return its status and what it has written."""
        output = Path(tempfile.mkstemp(prefix="job-", suffix=".out", dir=self.folder)[1])
        done = self.call(["sbatch", "--wait", f"--output={output}", *options, str(job), *arguments], env=env)
        return done.returncode, output.read_text() + done.stderr


def main() -> int:
    """Train with stock DDP and with the strategy, and print both reports."""
    parser = CommandParser(prog="bench.slurm", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="200mbit", help="of each node's link (default 200mbit)")
    parser.add_argument("--strategy", default="hierarchical_quantized:bits=4", metavar="NAME[:OPTION=VALUE...]")
    parser.add_argument("--job", choices=["torchrun", "srun"], default="torchrun", help="who starts the ranks")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = parser.parse_args()
    missing = EmulatedSlurm.missing()
    if missing is not None:
        return refuse("bench.slurm", ConfigurationError(missing))
    job, script = JOBS / f"slurm_{options.job}.sh", str(ROOT / "examples" / "launch" / "train.py")
    sizes = ["--nodes=2", f"--ntasks-per-node={1 if options.job == 'torchrun' else 2}"]
    with EmulatedSlurm(rate=options.rate) as slurm:
        for words in ([], ["-m", "commopt", "run", "--strategy", options.strategy, "--report"]):
            status, said = slurm.batch(sizes, job, *words, script, RANKS_PER_NODE="2")
            print(f"--- {' '.join([*words, 'train.py'])}", said, sep="\n", flush=True)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
