# SPDX-License-Identifier: Apache-2.0
"""A real Slurm of two nodes on this machine, and a training in it: stock DDP beside a strategy.

    python -m bench.slurm --rate 200mbit --strategy hierarchical_quantized:bits=4

slurmctld, a slurmd for each node and munge run in the namespaces of an emulated cluster, with their files in a
temporary folder. It needs root and Slurm, which --install takes from Debian's packages. The machine's own Slurm stays
as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.engine import ROOT, Engine, command_line, finish, markdown
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.command_line import refuse
from commopt.errors import ConfigurationError

PROGRAM = "bench.slurm"
JOBS = ROOT / "examples" / "launch"
_INSTALL = ("apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge")
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class EmulatedSlurm(Engine):
    """A Slurm whose nodes are those of an emulated cluster, called node0, node1, ...

    A job of the partition `urgent` takes the nodes of jobs of the other one, which are told a minute before.

    cpus: of each node, as Slurm counts them.
    """

    def __init__(self, nodes: int = 2, rate: str = "none", cpus: int = 8) -> None:
        super().__init__(nodes, rate)
        self._cpus = cpus

    @staticmethod
    def missing() -> str | None:
        """Return the reason why this machine cannot run it, None if it can."""
        absent = [tool for tool in _DAEMONS if shutil.which(tool) is None]
        if absent:
            return f"no {', '.join(absent)} on PATH; {PROGRAM} --install, or {' '.join(_INSTALL)}"
        return EmulatedCluster.missing()

    def _start(self) -> None:
        folder = self.folder
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
        while self.call(["sinfo", "-h", "-p", "all", "-o", "%T %D"]).stdout.strip() != f"idle {self._nodes}":
            if time.monotonic() > deadline:
                logs = "".join(each.read_text()[-2000:] for each in sorted(folder.glob("*.log")))
                raise ClusterUnavailableError(f"Slurm did not start within {_START_S:g} s: {logs}")
            time.sleep(0.2)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def batch(self, options: Sequence[str], job: Path, *arguments: str, **env: str) -> tuple[int, str]:
        """Submit a job file and wait for its end. Return its status and what it has written."""
        output = Path(tempfile.mkstemp(prefix="job-", suffix=".out", dir=self.folder)[1])
        done = self.call(["sbatch", "--wait", f"--output={output}", *options, str(job), *arguments], env=env)
        return done.returncode, output.read_text() + done.stderr


def found_in(said: str) -> dict[str, float]:
    """Return what examples/launch/train.py has printed at its end."""
    ((ranks, loss, step_ms),) = re.findall(r"^(\d+) ranks: loss ([\d.]+), (\d+) ms per step$", said, re.M)
    return {"ranks": int(ranks), "loss": float(loss), "step_ms": float(step_ms)}


def main() -> int:
    """Train with stock DDP and with the strategy, and report; return the exit status."""
    parser = command_line(PROGRAM, __doc__ or "")
    parser.add_argument("--install", action="store_true", help="install Slurm first where it is missing, by apt-get")
    parser.add_argument("--job", choices=["torchrun", "srun"], default="torchrun", help="who starts the ranks")
    options = parser.parse_args()
    if options.report:
        print(markdown(*options.report))
        return 0
    missing = EmulatedSlurm.missing()
    if missing is not None and options.install and shutil.which(_INSTALL[0]):
        subprocess.run(_INSTALL, check=False)
        missing = EmulatedSlurm.missing()
    if missing is not None:
        return refuse(PROGRAM, ConfigurationError(missing))
    job, script = JOBS / f"slurm_{options.job}.sh", str(JOBS / "train.py")
    sizes = ["--nodes=2", f"--ntasks-per-node={1 if options.job == 'torchrun' else 2}"]
    chosen = ["-m", "commopt", "run", "--strategy", options.strategy, "--report"]
    rows = []
    with EmulatedSlurm(rate=options.rate) as slurm:
        for name, words in (("stock DDP", []), (options.strategy, chosen)):
            status, said = slurm.batch(sizes, job, *words, script, RANKS_PER_NODE="2")
            print(f"--- sbatch {' '.join([*sizes, job.name, *words, 'train.py'])}", said, sep="\n", file=sys.stderr)
            if status:
                return status
            rows.append({"average": name, **found_in(said)})
        version = slurm.call(["sinfo", "--version"]).stdout.split()[-1]
    finish(PROGRAM, f"Slurm {version} and {options.job}", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
