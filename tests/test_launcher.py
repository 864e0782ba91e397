# SPDX-License-Identifier: Apache-2.0
"""Ranks from whoever started them: recorded variables of each launcher, and programs started with these alone."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from commopt.__main__ import main
from commopt.cost import Links
from commopt.errors import ConfigurationError
from commopt.launcher import LaunchedRanks, first_host, read_ranks, take_ranks

ROOT = Path(__file__).parents[1]


def variables(text: str) -> dict[str, str]:
    """Return the variables of NAME=VALUE words."""
    return dict(word.split("=", 1) for word in text.split())


# Recorded: Slurm 22.05 (two slurmd), Open MPI 4.1.4, MPICH 4.0.2 (Hydra), torchrun of torch 2.13; what no test reads is
# left out. A job of 2 nodes with --ntasks-per-node=2.
JOB = "SLURM_JOB_ID=3 SLURM_JOB_NODELIST=n[0-1] SLURM_NODELIST=n[0-1] SLURM_JOB_NUM_NODES=2 SLURM_NTASKS_PER_NODE=2 "
BATCH = variables(JOB + "SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NNODES=2")
SRUN_3 = variables(
    JOB + "SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_ID=0 SLURM_NNODES=2 "
    "SLURM_STEP_NODELIST=n[0-1] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_DISTRIBUTION=block"
)
SRUN_ON_ONE = variables(  # srun -N1 -n2 in the same job
    JOB + "SLURM_NTASKS=2 SLURM_NPROCS=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_ID=1 SLURM_NNODES=1 "
    "SLURM_STEP_NODELIST=n0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2"
)
CYCLIC_1 = variables(  # srun -N2 -n4 --distribution=cyclic, which gave one node three
    "SLURM_JOB_ID=9 SLURM_JOB_NODELIST=n[0-1] SLURM_NTASKS=4 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 "
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[0-1] SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=3,1 "
    "SLURM_DISTRIBUTION=cyclic"
)
ARBITRARY_0 = variables(  # rank 0 is on n1
    "SLURM_JOB_ID=8 SLURM_JOB_NODELIST=n[0-1] SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=1 "
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[0-1] SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1,2 "
    "SLURM_DISTRIBUTION=arbitrary"
)
MPIRUN_1 = variables(  # on one host
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_MCA_ess_base_jobid=1649737729 PMIX_NAMESPACE=1649737729 PMIX_RANK=1 OMPI_UNIVERSE_SIZE=2"
)
_MPIRUN_OF_4 = "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=994574337 "
MPIRUN_IN_JOB_0 = BATCH | variables(_MPIRUN_OF_4 + "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 PMIX_RANK=0")
MPIRUN_IN_JOB_3 = variables(  # its daemon on n1 is a task of Slurm
    JOB
    + _MPIRUN_OF_4
    + "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 PMIX_RANK=3 SLURM_NTASKS=1 SLURM_PROCID=0 "
    "SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_TASKS=1 "
    "SLURM_STEP_TASKS_PER_NODE=1 SLURM_NNODES=1"
)
HYDRA_1 = variables("PMI_RANK=1 PMI_SIZE=2 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 HYDI_CONTROL_FD=7")
HYDRA_IN_JOB_3 = variables(
    JOB + "PMI_RANK=3 PMI_SIZE=4 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 SLURM_NTASKS=4 SLURM_PROCID=1 "
    "SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_ID=3 SLURM_STEP_NODELIST=n[0-1] SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
SRUN_PMI2_3 = SRUN_3 | variables("PMI_FD=11 PMI_JOBID=4.0 PMI_RANK=3 PMI_SIZE=4")
TORCHRUN_3 = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=41111 GROUP_RANK=1 "
    "TORCHELASTIC_RUN_ID=3 TORCHELASTIC_USE_AGENT_STORE=True"
)
SRUN_OF_TORCHRUN_1 = variables(  # srun torchrun, with --ntasks-per-node=1
    "SLURM_JOB_ID=3 SLURM_JOB_NODELIST=n[0-1] SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1 "
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[0-1] SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)


@pytest.mark.parametrize(
    ("environ", "source", "numbers", "address"),
    [
        pytest.param(SRUN_3, "Slurm", (3, 4, 1, 2), "n0", id="srun"),
        pytest.param(SRUN_ON_ONE, "Slurm", (1, 2, 1, 2), "127.0.0.1", id="srun on one node"),
        pytest.param(CYCLIC_1, "Slurm", (1, 4, 0, 1), "n0", id="cyclic, 3 + 1"),
        pytest.param(ARBITRARY_0, "Slurm", (0, 3, 0, 2), None, id="arbitrary"),
        pytest.param(MPIRUN_1, "Open MPI", (1, 2, 1, 2), "127.0.0.1", id="mpirun"),
        pytest.param(MPIRUN_IN_JOB_0, "Open MPI", (0, 4, 0, 2), "n0", id="mpirun in a job"),
        pytest.param(MPIRUN_IN_JOB_3, "Open MPI", (3, 4, 1, 2), "n0", id="mpirun in a job, other node"),
        pytest.param(HYDRA_1, "PMI", (1, 2, 1, 2), "127.0.0.1", id="Hydra"),
        pytest.param(HYDRA_IN_JOB_3, "PMI", (3, 4, 1, 2), "n0", id="Hydra in a job"),
        pytest.param(SRUN_PMI2_3, "PMI", (3, 4, 1, 2), "n0", id="srun --mpi=pmi2"),
        pytest.param(TORCHRUN_3, "torchrun", (3, 4, 1, 2), "n0", id="torchrun"),
        pytest.param(SRUN_OF_TORCHRUN_1 | TORCHRUN_3, "torchrun", (3, 4, 1, 2), "n0", id="torchrun in srun"),
        pytest.param(SRUN_3 | {"MASTER_ADDR": "n7"}, "Slurm", (3, 4, 1, 2), "n7", id="an address of the user's"),
        pytest.param(SRUN_3 | {"WORLD_SIZE": "4"}, "Slurm", (3, 4, 1, 2), "n0", id="WORLD_SIZE that agrees"),
        pytest.param(
            SRUN_3 | {"RANK": "3", "WORLD_SIZE": "4"}, "RANK and WORLD_SIZE", (3, 4, 1, 2), "n0", id="both set by hand"
        ),
    ],
)
def test_recorded_launches(
    environ: Mapping[str, str], source: str, numbers: tuple[int, ...], address: str | None
) -> None:
    found = read_ranks(environ)
    assert found is not None
    assert found.source == source
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == numbers
    assert found.address == address


@pytest.mark.parametrize("environ", [{}, BATCH, {**SRUN_3, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}])
def test_a_process_that_is_alone(environ: dict[str, str]) -> None:
    """A job script has SLURM_PROCID=0 and SLURM_NTASKS=4, and nobody else runs it."""
    before = dict(environ)
    assert take_ranks(environ) is None
    assert environ == before


def test_ranks_of_a_job_agree_where_they_meet() -> None:
    """Whatever else their nodes' variables say; and steps, and jobs that share a host, have ports of their own."""
    job = [MPIRUN_IN_JOB_0, MPIRUN_IN_JOB_3]
    assert len({(found.address, found.port) for each in job if (found := read_ranks(each))}) == 1
    ports = {found.port for each in (SRUN_3, SRUN_ON_ONE, CYCLIC_1, MPIRUN_1) if (found := read_ranks(each))}
    assert len(ports) == 4
    assert all(1024 < (port or 0) < 32768 for port in ports)  # a client is given none of them


def test_what_torch_reads_is_set_where_it_is_absent() -> None:
    environ = {**SRUN_3, "MASTER_PORT": "29507", "LOCAL_RANK": "0"}  # its own: --gpus-per-task shows a rank one GPU
    take_ranks(environ)
    ours = {name: environ[name] for name in environ.keys() - SRUN_3.keys()}
    assert ours == variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n0 MASTER_PORT=29507")
    taken = dict(environ)
    again = take_ranks(environ)  # as a script under `commopt run` does
    assert environ == taken
    assert again is not None
    assert (again.rank, again.world_size) == (3, 4)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"WORLD_SIZE": "4"}, ("WORLD_SIZE=4 is set and RANK is not", "torchrun", "unset WORLD_SIZE")),
        ({"RANK": "1"}, ("RANK=1 is set and WORLD_SIZE is not",)),
        (SRUN_3 | {"WORLD_SIZE": "8"}, ("WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4", "unset WORLD_SIZE")),
        (SRUN_3 | {"RANK": "0"}, ("RANK=0", "SLURM_PROCID=3", "unset RANK")),
        (SRUN_3 | {"RANK": "0", "WORLD_SIZE": "1"}, ("WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4", "unset RANK")),
        (MPIRUN_1 | SRUN_3, ("OMPI_COMM_WORLD_SIZE=2", "SLURM_STEP_NUM_TASKS=4", "--ntasks-per-node=1")),
        (MPIRUN_1 | {"PMI_RANK": "0", "PMI_SIZE": "2"}, ("OMPI_COMM_WORLD_RANK=1", "PMI_RANK=0", "unset PMI_RANK")),
        # Four times `mpirun -np 1`, one on each node.
        (
            SRUN_OF_TORCHRUN_1 | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            ("OMPI_COMM_WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=2"),
        ),
        ({**MPIRUN_1, "OMPI_COMM_WORLD_SIZE": "two"}, ("OMPI_COMM_WORLD_SIZE='two'", "whole number")),
        ({**HYDRA_1, "PMI_RANK": "2"}, ("PMI_RANK=2", "PMI_SIZE=2", "count from 0")),
        (
            {**MPIRUN_1, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            ("OMPI_COMM_WORLD_SIZE=2", "export MASTER_ADDR", "mpirun -x"),
        ),
        (ARBITRARY_0, ("SLURM_PROCID=0", "nothing tells where rank 0 is", "export MASTER_ADDR")),
    ],
)
@pytest.mark.parametrize("command", ["bandwidth", "probe", "doctor"])
def test_a_contradiction_names_variables_values_and_the_fix(
    environ: dict[str, str],
    told: tuple[str, ...],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"commopt {command}: ")
    assert said.count("\n") == 1
    for part in told:
        assert part in said


def test_a_script_may_have_its_own_way_to_meet() -> None:
    environ = {**MPIRUN_1, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # mpi4py may broadcast the address
    ranks = take_ranks(environ, meets=False)
    assert ranks is not None
    assert environ["RANK"] == "1"
    assert "MASTER_ADDR" not in environ
    lightning = variables("WORLD_SIZE=2 LOCAL_RANK=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=1")  # of a process
    assert take_ranks(lightning, meets=False) is None  # that it has started, whose rank it finds out later


def test_rank_0_is_where_its_launcher_says() -> None:
    elsewhere = {**SRUN_3, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "192.0.2.77,n1"}
    with pytest.raises(ConfigurationError, match=r"Slurm names 192\.0\.2\.77 as the first host.*export MASTER_ADDR"):
        take_ranks(elsewhere)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n0", "n0"),
        ("n[0-1]", "n0"),
        ("n[007,010-012],m1", "n007"),
        ("m1,n[0-3]", "m1"),
        ("rack[2-3]-n[01-04]", "rack2-n01"),
        ("a-b[5]-c.d,e", "a-b5-c.d"),
        ("", None),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str | None) -> None:
    assert first_host(nodes) == first


def test_the_line_that_names_the_launcher() -> None:
    ranks = LaunchedRanks("Slurm", ("SLURM_PROCID", "SLURM_NTASKS"), 0, 8, 0, 4, "n0", 27629)
    assert str(ranks) == "ranks from Slurm: 8, 4 on this node, meeting at n0 port 27629"


# ------------------------------------------------------------------------------------------ programs


def slurm(rank: int, job: str) -> dict[str, str]:
    text = f"SLURM_JOB_ID={job} SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_NTASKS=2 SLURM_LOCALID={rank} "
    return variables(text + "SLURM_STEP_NODELIST=localhost")


def open_mpi(rank: int, job: str) -> dict[str, str]:
    text = f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} "
    return variables(text + f"OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE={job}")


def both(launcher: str, *arguments: str, differs: Mapping[str, str] | None = None) -> list[tuple[int, str, str]]:
    """Start a command twice with the variables of a launcher alone; return status, output and errors of each rank."""
    of = {"Slurm": slurm, "Open MPI": open_mpi}[launcher]
    job = str(secrets.randbelow(10**9))  # by which the port is chosen
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "GLOO", "SLURM"))}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(2):
        environ = {**clean, **of(rank, job), "NCCL_HOSTID": f"node{rank}", **((differs or {}) if rank else {})}
        command = [sys.executable, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=environ, **pipes))  # type: ignore[call-overload]
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("launcher", ["Slurm", "Open MPI"])
def test_bandwidth_measures_all_ranks(launcher: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    flags = f"-b 1K -e 1K -n 2 -w 1 --aggregator torch --json {path}".split()
    first, second = both(launcher, "-m", "commopt", "bandwidth", *flags)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert json.loads(path.read_text())["environment"]["world_size"] == 2
    assert f"commopt bandwidth: ranks from {launcher}: 2" in first[2]
    assert "ranks from" not in second[2]
    assert second[1] == ""


@pytest.mark.parametrize("launcher", ["Slurm", "Open MPI"])
def test_probe_measures_links(launcher: str, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    flags = f"-b 1K -e 2K --budget 1 --only world -o {path}".split()
    first, second = both(launcher, "-m", "commopt", "probe", *flags)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert Links.load(path).curves  # one rank alone has none
    assert f"commopt probe: ranks from {launcher}: 2" in first[2]


def test_doctor_prints_one_report_with_hosts() -> None:
    first, second = both("Slurm", "-m", "commopt", "doctor", "--json", differs={"NCCL_PROTO": "LL"})
    assert second[:2] == (0, "")
    (found,) = [each for each in json.loads(first[1])["findings"] if each["check"] == "nodes-settings"]
    assert found["value"] == "unset on node0 (rank 0); LL on node1 (rank 1)"
    assert first[0] == 3
    assert "commopt doctor: ranks from Slurm: 2" in first[2]


def test_doctor_reads_logs_once(tmp_path: Path) -> None:
    log = tmp_path / "nccl.n0.1"
    log.write_text("n0:1:1 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>\n")
    first, second = both("Open MPI", "-m", "commopt", "doctor", "--log", str(log))
    assert "fine" in first[1]
    assert second[:2] == (0, "")


def test_run_lets_a_plain_script_meet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo')\n"
        "ddp = DDP(torch.nn.Linear(8, 4, bias=False))\n"
        "ddp(torch.ones(2, 8)).sum().backward()\n"
        "print('ranks', dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    found = both("Open MPI", "-m", "commopt", "run", "--strategy", "hierarchical", "--report", str(script))
    assert [each[0] for each in found] == [0, 0], found
    assert all("ranks 2" in each[1] for each in found)
    assert re.search(r"^Linear .*Hierarchical", found[0][1], re.M)


def test_examples_take_the_ranks_of_srun() -> None:
    found = both("Slurm", str(ROOT / "examples" / "train_digits.py"), "--steps", "2", "--hook", "ddp")
    assert [each[0] for each in found] == [0, 0], found
    assert found[0][1].startswith("ddp: step 2, ")
    assert found[1][1] == ""  # rank 1 of two: alone, it would print too
