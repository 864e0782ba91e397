# SPDX-License-Identifier: Apache-2.0
"""The job files of docs/launch.md, and commopt's programs, on a real Slurm of two nodes; with mpirun inside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bench.slurm import JOBS, EmulatedSlurm
from tests.speed import limit

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "launch.md").read_text()
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
RUN = ["-m", "commopt", "run", "--strategy", "hierarchical_quantized:bits=4", "--report", str(JOBS / "train.py")]


def test_the_page_shows_each_recipe_as_it_is() -> None:
    for file in (*JOBS.glob("*.sh"), *JOBS.glob("*.yaml")):
        assert f"\n```\n{file.read_text()}```\n" in PAGE, f"docs/launch.md does not show {file.name}"
        assert f"examples/launch/{file.name}" in PAGE


def test_the_schemas_of_kubernetes_accept_its_file() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    import yaml

    documents = list(yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text()))
    assert [each["kind"] for each in documents] == ["Service", "Job"]
    for each in documents:
        schemas.validate(each, "1.31", strict=True)
        with pytest.raises(schemas.ValidationError, match="complitions"):
            schemas.validate({**each, "spec": {**each["spec"], "complitions": 4}}, "1.31", strict=True)


def test_the_models_of_kubeflow_know_every_field_of_its_file() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs pip install kubeflow-trainer-api")
    import yaml

    document = yaml.safe_load((JOBS / "kubeflow.yaml").read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document
    document["spec"]["trainer"]["numNode"] = 4
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() != document, "fields may have any name"


def test_the_file_of_skypilot_starts_torchrun_with_this_node_and_the_first_address(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pip install pyyaml")
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@"\n')
    torchrun.chmod(0o755)
    told = {"NUM_NODES": "4", "NUM_GPUS_PER_NODE": "8", "NODE_RANK": "2", "NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9"}
    environ = {f"SKYPILOT_{name}": value for name, value in told.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, capture_output=True, text=True, env={**environ, "PATH": path}, check=True)
    assert done.stdout == (
        "--nnodes 4 --nproc-per-node 8 --node-rank 2 --master-addr 10.0.0.7 --master-port 29500 "
        "-m commopt run --strategy hierarchical_bf16 --report train.py\n"
    )
    assert task["num_nodes"] == 4
    assert task["resources"]["accelerators"].endswith(f":{told['NUM_GPUS_PER_NODE']}")


SKYPILOT = Path(sys.prefix, "skypilot")  # in a folder of its own: its requirements contradict those of Transformers
VALIDATING = """
import json, sys
from jsonschema import ValidationError, validate
from sky.utils.schemas import get_task_schema
for line in sys.stdin:
    try:
        validate(json.loads(line), get_task_schema())
    except ValidationError as error:
        print(error.message)
    else:
        print("valid")
"""


@pytest.mark.skipif(not SKYPILOT.exists(), reason=f"needs pip install --target {SKYPILOT} skypilot")
def test_the_schema_of_skypilot_accepts_its_file(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pip install pyyaml")
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    tasks = [task, {**task, "num_node": 4}, {**task, "num_nodes": "four"}]
    done = subprocess.run(
        [sys.executable, "-c", VALIDATING],
        input="\n".join(map(json.dumps, tasks)),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SKYPILOT), "HOME": str(tmp_path)},
        check=True,
    )
    valid, unknown, text = done.stdout.splitlines()
    assert valid == "valid"
    assert "'num_node' was unexpected" in unknown
    assert "'four' is not of type 'integer'" in text


@pytest.fixture(scope="module")
def slurm() -> Iterator[EmulatedSlurm]:
    if missing := EmulatedSlurm.missing():
        pytest.skip(missing)
    with EmulatedSlurm() as running:
        yield running


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("job", "tasks_per_node", "source"), [("torchrun", 1, "torchrun"), ("srun", 2, "Slurm"), ("mpirun", 2, "Open MPI")]
)
def test_a_job_file_trains(job: str, tasks_per_node: int, source: str, slurm: EmulatedSlurm) -> None:
    if job == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun on PATH; apt-get install openmpi-bin")
    options = ["--nodes=2", f"--ntasks-per-node={tasks_per_node}"]
    status, said = slurm.batch(options, JOBS / f"slurm_{job}.sh", *RUN, RANKS_PER_NODE="2", **AS_ROOT)
    assert status == 0, said
    assert f"commopt run: ranks from {source}: 4, 2 on this node, meeting at node0 port " in said
    assert re.search(r"^4 ranks: loss [\d.]+, \d+ ms per step$", said, re.M)
    # 4 bits, and a scale for each 64, of 1.3 M parameters, less the half that stays with its server
    (inter,) = re.findall(r"^Sequential .* (\S+)$", said, re.M)
    assert 0.25 < float(inter) < 0.45


@pytest.mark.slow
@pytest.mark.cluster
def test_doctor_of_a_step_prints_one_report(slurm: EmulatedSlurm) -> None:
    """Cyclic ranks are found, and a setting that differs is named with its host."""
    doctor = '[ "$SLURM_PROCID" = 3 ] && export NCCL_PROTO=LL; exec python -m commopt doctor --json'
    done = slurm.call(["srun", "-N2", "--ntasks-per-node=2", "--distribution=cyclic", "bash", "-c", doctor])
    found = {each["check"]: each["value"] for each in json.loads(done.stdout)["findings"]}
    assert found["rank-layout"] == "node0: 0, 2 | node1: 1, 3"
    settings = [each for each in json.loads(done.stdout)["findings"] if each["read"] == "NCCL_PROTO"]
    assert "unset on node0 (ranks 0, 2), node1 (rank 1); LL on node1 (rank 3)" in [each["value"] for each in settings]
    assert "commopt doctor: ranks from Slurm: 4" in done.stderr


@pytest.mark.slow
@pytest.mark.cluster
def test_bandwidth_of_nodes_that_differ(slurm: EmulatedSlurm) -> None:
    """3 + 1 ranks in an order of the user's, which does not tell the first host."""
    hosts = slurm.folder / "hosts"
    hosts.write_text("node1\nnode1\nnode1\nnode0\n")
    result = slurm.folder / "found.json"
    flags = f"-b 1K -e 1K -n 2 -w 1 --aggregator torch,hierarchical --json {result}".split()
    command = ["srun", "-N2", "-n4", "--distribution=arbitrary", "python", "-m", "commopt", "bandwidth", *flags]
    told = {"SLURM_HOSTFILE": str(hosts), "GLOO_SOCKET_IFNAME": "eth0"}
    refused = slurm.call(command, env=told)
    assert refused.returncode == 2
    assert refused.stderr.count("nothing tells where rank 0 is; export MASTER_ADDR") == 4
    done = slurm.call(command, env={**told, "MASTER_ADDR": "node1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(result.read_text())["environment"]["nodes"] == [[0, 1, 2], [3]]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_job_script_itself_is_no_rank(slurm: EmulatedSlurm) -> None:
    """It has SLURM_NTASKS=4 too, and would wait for three ranks that nobody starts."""
    job = slurm.folder / "alone.sh"
    job.write_text("#!/bin/bash\npython -m commopt bandwidth -b 8 -e 8\n")
    status, said = slurm.batch(["--nodes=2", "--ntasks-per-node=2"], job)
    assert status == 2
    assert "commopt bandwidth: no rank: start it with torchrun" in said


DYING = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(64, 64))
for step in range(100):
    if step == 5 and dist.get_rank() == 3:
        os.kill(os.getpid(), 9)
    ddp(torch.ones(2, 64)).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_death_is_told_on_every_rank(slurm: EmulatedSlurm) -> None:
    script = slurm.folder / "dying.py"
    script.write_text(DYING)
    command = ["srun", "-N2", "--ntasks-per-node=2", "--label", "python", "-m", "commopt", "run", "--strategy", "flat"]
    done = slurm.call([*command, str(script)], timeout_s=120, env={"GLOO_SOCKET_IFNAME": "eth0"})
    assert done.returncode != 0
    told = set(re.findall(r"^(\d): .*LaneError.*$", done.stderr, re.M))
    assert told == {"0", "1", "2"}, done.stderr


RESUMING = ["--steps", "60", "--every", "10", "--pause", "0.2"]


class Stopping:
    """A training of four ranks, in a folder of its own, that is stopped once it has a checkpoint."""

    def __init__(self, slurm: EmulatedSlurm, name: str) -> None:
        self._slurm = slurm
        self.folder = slurm.folder / name
        self.folder.mkdir()

    def submit(self, pause_s: str) -> str:
        """Submit the job file; return the job's number."""
        sizes = ["--nodes=2", "--ntasks-per-node=2", f"--output={self.folder}/job.out"]
        script = [str(JOBS / "train_preempted.py"), "--folder", str(self.folder), *RESUMING, "--pause", pause_s]
        done = self._slurm.call(["sbatch", "--parsable", *sizes, str(JOBS / "slurm_preempted.sh"), *script])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def stop(self, job: str, by: str) -> None:
        """Stop the job, wait until Slurm has queued it again, and let it start at once."""
        wait_for(self.folder / "training.pt")
        if by == "requeue":
            assert self._slurm.call(["scontrol", "requeue", job]).returncode == 0
        else:
            urgent = ["srun", "--partition=urgent", "--nodes=2", "--exclusive", "hostname"]
            done = self._slurm.call(urgent)
            assert sorted(done.stdout.split()) == ["node0", "node1"], done.stderr
        wait_until(partial(is_in_state, self._slurm, job, "PENDING"))
        self._slurm.call(["scontrol", "update", f"JobId={job}", "StartTime=now"])  # Slurm would wait for two minutes

    def ended(self, job: str) -> tuple[list[int], str]:
        """Wait for the end; return the steps that it began with, and the digest of the parameters."""
        wait_until(partial(is_in_state, self._slurm, job, "COMPLETED", "FAILED"))
        said = (self.folder / "job.out").read_text()
        assert is_in_state(self._slurm, job, "COMPLETED"), said
        (bits,) = re.findall(r"^bits (\w{64})$", said, re.M)
        return [int(step) for step in re.findall(r"^from step (\d+)$", said, re.M)], bits


@pytest.fixture(scope="module")
def undisturbed(slurm: EmulatedSlurm) -> str:
    """Return the digest of a training that nobody stopped."""
    training = Stopping(slurm, "undisturbed")
    firsts, bits = training.ended(training.submit(pause_s="0"))
    assert firsts == [0]
    return bits


@pytest.mark.slow
@pytest.mark.cluster
def test_a_requeued_job_ends_with_the_same_bits(slurm: EmulatedSlurm, undisturbed: str) -> None:
    training = Stopping(slurm, "requeued")
    job = training.submit(pause_s="0.2")
    training.stop(job, by="requeue")
    (first, again), bits = training.ended(job)
    assert first == 0
    assert again in {10, 20, 30, 40, 50}  # it did not begin anew
    assert bits == undisturbed


@pytest.mark.slow
@pytest.mark.cluster
def test_a_preempted_job_saves_when_it_is_told_and_ends_with_the_same_bits(
    slurm: EmulatedSlurm, undisturbed: str
) -> None:
    """A job of more priority takes its nodes, and Slurm sends the signal of the job file."""
    training = Stopping(slurm, "preempted")
    job = training.submit(pause_s="0.2")
    training.stop(job, by="preemption")
    firsts, bits = training.ended(job)
    (saved,) = re.findall(r"^told to stop, saved step (\d+)$", (training.folder / "job.out").read_text(), re.M)
    assert firsts == [0, int(saved)]  # not a step is lost
    assert bits == undisturbed


@pytest.mark.slow
@pytest.mark.cluster
def test_a_preempted_job_of_submitit_ends_with_the_same_bits(slurm: EmulatedSlurm, undisturbed: str) -> None:
    pytest.importorskip("submitit", reason="needs pip install submitit")
    training = Stopping(slurm, "submitit")
    sizes = ["--nodes", "2", "--ranks-per-node", "2", "--gpus-per-node", "0"]
    script = [str(JOBS / "submitit_job.py"), "--folder", str(training.folder), *RESUMING]
    output = slurm.folder / "submitit.out"
    submitting = slurm.start(["python", *script, *sizes], output)
    try:
        wait_until(lambda: re.search(r"^job (\d+)$", output.read_text(), re.M) is not None)
        (job,) = re.findall(r"^job (\d+)$", output.read_text(), re.M)
        training.stop(job, by="preemption")
        submitting.wait(limit(300))
    finally:
        submitting.kill()
    said = output.read_text()
    bits = re.findall(r"^rank (\d): bits (\w+)$", said, re.M)  # submitit's warnings are between them
    assert bits == [(str(rank), undisturbed) for rank in range(4)], said
    logs = "".join(each.read_text() for each in training.folder.glob(f"{job}/*_0_log.out"))
    first, again = (int(step) for step in re.findall(r"^from step (\d+)$", logs, re.M))
    assert first == 0
    assert again in {10, 20, 30, 40, 50}


def is_in_state(slurm: EmulatedSlurm, job: str, *states: str) -> bool:
    said = slurm.call(["scontrol", "show", "job", job]).stdout
    return any(f"JobState={state}" in said for state in states)


def wait_for(file: Path) -> None:
    wait_until(file.exists)


def wait_until(condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + limit(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "Slurm did not get there"
        time.sleep(0.2)
