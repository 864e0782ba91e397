# SPDX-License-Identifier: Apache-2.0
"""The doctor says who hangs where: torch's watchdog lines, and dumps of its flight recorder, without pickle.load."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.__main__ import main
from commopt.doctor.finding import Finding, Severity
from commopt.doctor.flight_recorder import RecordedCollective, read_dump
from commopt.doctor.log_findings import examine
from commopt.doctor.log_reader import parse_log, read_logs
from commopt.doctor.plain_pickle import load_plain
from commopt.errors import ConfigurationError


def caught(rank: int, seq: int, kind: str = "ALLREDUCE", numel: str = "NumelIn=1, NumelOut=1, ") -> str:
    work = f"WorkNCCL(SeqNum={seq}, OpType={kind}, {numel}Timeout(ms)=600000)"
    return (
        f"[rank{rank}]:[E827 06:31:11.9 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: {work} ran for 600013 milliseconds before timing out.\n"
    )


def status(
    rank: int, enqueued: int, completed: int, at: int | None = None, group: str = "ID 0 PG GUID 0(default_pg)"
) -> str:
    what = "Received a dump signal due to a collective timeout from this local rank. L"
    if at is not None:
        what = f"Exception (either an error or timeout) detected by watchdog at work: {at}, l"
    work = f"ast enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    return f"[rank{rank}]:[E827 x.cpp:1] [PG {group} Rank {rank}] {what}{work}\n"


def told(*lines: str) -> list[Finding]:
    log = parse_log(lines, "train.log")
    assert log is not None
    return [finding for finding in examine(log) if finding.check == "log-hang"]


def test_ranks_in_different_operations() -> None:
    (finding,) = told(
        caught(1, 5),
        status(1, 5, 4, 5),
        caught(0, 7, "ALLGATHER", "NumelIn=4, NumelOut=8, "),
        status(0, 7, 6, 7),
    )
    assert finding.severity is Severity.ERROR
    for part in ("rank 0 waits in SeqNum 7 ALLGATHER of 4 to 8", "rank 1 waits in SeqNum 5 ALLREDUCE of 1 element"):
        assert part in (finding.value or "")
    assert "the first difference: at SeqNum 5" in (finding.value or "")
    assert "rank 1 is behind" in finding.expected


@pytest.mark.parametrize(
    "second",
    [caught(1, 9, "BROADCAST"), caught(1, 9, "ALLREDUCE", "NumelIn=2, NumelOut=2, ")],
)
def test_one_number_and_two_operations_or_sizes(second: str) -> None:
    (finding,) = told(caught(0, 9), second, caught(2, 9))
    assert "the first difference: rank 0, 2 SeqNum 9 ALLREDUCE of 1 element; rank 1 SeqNum 9" in (finding.value or "")
    assert "same order" in (finding.remedy or "")


def test_a_rank_that_did_not_call_is_behind() -> None:
    (finding,) = told(caught(0, 1580), status(0, 1582, 1579, 1580, "1"), status(1, 1579, 1579, None, "1"))
    assert "rank 1 is behind, and has not called SeqNum 1580" in finding.expected
    assert finding.confidence == "high"


def test_a_rank_that_says_nothing_is_named() -> None:
    old = "[E ProcessGroupNCCL.cpp:828] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=20, "
    old += "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804649 milliseconds before timing out.\n"
    (finding,) = told(old.format(0), old.format(1), old.format(3))
    assert "nothing is known of rank 2" in finding.expected
    assert "rank 0, 1, 3 waits in SeqNum 20 ALLREDUCE" in (finding.value or "")


def test_all_ranks_in_one_operation() -> None:
    (finding,) = told(*[caught(rank, 4) for rank in range(4)])
    assert "the same operation" in finding.expected
    assert "probe" in (finding.remedy or "")


def test_groups_are_told_apart() -> None:
    first, second = told(
        *[caught(rank, 7) + status(rank, 7, 6, 7) for rank in range(2)],
        caught(0, 30, "_ALLGATHER_BASE") + status(0, 30, 29, 30, "ID 1 PG GUID 3(tensor)"),
        status(1, 29, 29, None, "ID 1 PG GUID 3(tensor)"),
    )
    assert "group tensor: rank 0 waits in SeqNum 30" in (first.value or "")
    assert "rank 1 is behind" in first.expected
    assert "SeqNum 7 ALLREDUCE" in (second.value or "")


def test_a_line_that_a_terminal_broke_and_two_in_one() -> None:
    whole = caught(0, 4, "BROADCAST")
    (finding,) = told(whole[:150] + "\n", whole[150:], caught(1, 4, "BROADCAST").strip() + caught(2, 3))
    assert "rank 2 waits in SeqNum 3" in (finding.value or "")
    assert "rank 0, 1 waits in SeqNum 4 BROADCAST" in (finding.value or "")


def test_messages_between_two_ranks_are_no_different_operations() -> None:
    (finding,) = told(
        caught(0, 12, "SEND"),
        status(0, 12, 11, 12),
        caught(1, 9, "RECV"),
        status(1, 9, 8, 9),
    )
    assert (finding.severity, finding.value) == (
        Severity.ERROR,
        "rank 0 waits in SEND SeqNum 12; rank 1 waits in RECV SeqNum 9",
    )
    assert "meet its receive" in finding.expected


def test_what_torch_finds_out_itself() -> None:
    barrier, mismatch, stuck = told(
        "RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 30000 ms\n",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: X, but Rank 1 Y\n",
        "[rank3]:[E1 x.cpp:1] [PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds\n",
    )
    assert "rank 1, 2 did not reach the barrier" in (barrier.value or "")
    assert "but Rank 1 Y" in (mismatch.value or "")
    assert ("rank 3" in (stuck.value or ""), stuck.severity) == (True, Severity.WARNING)


def test_what_nccl_says_of_a_job_that_hangs_follows() -> None:
    lost = "host-b:1:2 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer a<5>\n"
    log = parse_log([caught(0, 4), status(0, 4, 3, 4), status(1, 3, 3), lost], "l")
    assert log is not None
    first, *others = examine(log)
    assert first.check == "log-hang"
    assert [one.severity for one in others if one.check == "log-warnings"] == [Severity.INFO]


# ------------------------------------------------------------------------------------------ flight recorder


def dump(rank: int, *called: tuple[str, int, str], completed: int = 0) -> dict[str, Any]:
    """What torch writes: (name, elements, state) of each operation."""
    entries = [
        {
            "record_id": place,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": place + 1,
            "is_p2p": False,
            "profiling_name": f"nccl:{name}",
            "input_sizes": [[2, numel // 2]],
            "output_sizes": [[numel]],
            "state": state,
            "retired": False,
        }
        for place, (name, numel, state) in enumerate(called)
    ]
    status = {"last_enqueued_collective": len(called), "last_completed_collective": completed}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return {"version": "2.4", "entries": entries, "pg_config": config, "pg_status": {"0": status}}


SUM, HALF = ("all_reduce", 8, "completed"), ("all_reduce", 8, "started")


def written(folder: Path, dumps: dict[int, dict[str, Any]], protocol: int | None = 2) -> Path:
    for rank, content in dumps.items():
        data = json.dumps(content).encode() if protocol is None else pickle.dumps(content, protocol)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return folder


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_dumps_of_all_ranks_name_the_first_difference(protocol: int | None, tmp_path: Path) -> None:
    other = (SUM, ("broadcast", 8, "started"), HALF)
    dumps = {0: dump(0, SUM, HALF, completed=1), 1: dump(1, *other, completed=1), 2: dump(2, SUM, HALF, completed=1)}
    log = read_logs([written(tmp_path, dumps, protocol)])
    (finding,) = [one for one in examine(log) if one.check == "log-hang"]
    shown = "rank 0, 2 SeqNum 2 all_reduce of 8 elements; rank 1 SeqNum 2 broadcast of 8 elements"
    assert f"the first difference: {shown}" in (finding.value or "")


def test_dumps_say_who_is_behind_and_who_is_missing(tmp_path: Path) -> None:
    (tmp_path / "behind").mkdir()
    dumps = {0: dump(0, SUM, HALF, completed=1), 1: dump(1, SUM, HALF, completed=1), 2: dump(2, SUM, completed=1)}
    log = read_logs([written(tmp_path / "behind", dumps)])
    (finding,) = [one for one in examine(log) if one.check == "log-hang"]
    assert "rank 2 is behind, and has not called SeqNum 2" in finding.expected
    del dumps[2]
    (tmp_path / "missing").mkdir()
    log = read_logs([written(tmp_path / "missing", dumps)])
    (finding,) = [one for one in examine(log) if one.check == "log-hang"]
    assert "nothing is known of rank 2" in finding.expected


def test_dumps_of_messages_between_two_ranks(tmp_path: Path) -> None:
    content = dump(0, SUM, completed=1)
    pair = {"is_p2p": True, "p2p_seq_id": 3, "process_group": ("0", "x"), "profiling_name": "nccl:send 0->1"}
    content["entries"] += [{**pair, "state": "started"}, {**pair, "state": "completed", "profiling_name": "nccl:recv"}]
    log = read_logs([written(tmp_path, {0: content})])
    (finding,) = [one for one in examine(log) if one.check == "log-hang"]
    assert finding.value == "rank 0 waits in send 0->1"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")


def test_what_this_torch_writes_is_read(recorder: None, tmp_path: Path) -> None:
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch has no recorder of gloo's operations")
    code = (
        "import torch, torch.distributed as d\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
        "d.all_reduce(torch.ones(3, 4)); d.broadcast(torch.ones(5), 0)\n"
        "import torch._C._distributed_c10d as c\n"
        "open('trace_0', 'wb').write(c._dump_fr_trace())\n"
        "open('json_0', 'wb').write(c._dump_fr_trace_json())\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    for name in ("trace_0", "json_0"):
        found = read_dump(tmp_path / name)
        assert found is not None
        assert (found.rank, found.groups["0"].completed) == (0, 2)
        assert found.groups["0"].history == {
            1: RecordedCollective(1, "all_reduce", 12, 12),
            2: RecordedCollective(2, "broadcast", 5, 5),
        }


class Bomb:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.file.touch, ())


def test_a_pickle_that_would_run_something_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(pickle.dumps({"entries": [Bomb(tmp_path / "made")]}, 2))
    assert main(["doctor", "--log", str(file)]) == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)
    assert "more than plain values" in output.err
    assert not (tmp_path / "made").exists()
    for data in (pickle.dumps({"a": 1}, 2), pickle.dumps({"entries": []}, 2)[:-3], b"\x80\x02]\x71\x00"):
        file.write_bytes(data)
        with pytest.raises(ConfigurationError, match="is no dump of torch's flight recorder"):
            read_dump(file)


def test_a_log_that_begins_with_json_is_a_log(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"step": 1}\n' + caught(0, 4))
    assert read_dump(file) is None
    assert read_logs([file]).hang


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner, inner, inner),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    assert load_plain(BytesIO(pickle.dumps(value, protocol))) == value


@settings(deadline=None, max_examples=300)
@given(PLAIN, st.integers(0, 400), st.binary(min_size=1, max_size=3))
def test_no_pickle_is_so_broken_that_it_does_more_than_raise(value: Any, place: int, change: bytes) -> None:
    data = pickle.dumps({"entries": value}, 4)
    place %= len(data)
    with contextlib.suppress(ValueError):
        load_plain(BytesIO(data[:place] + change + data[place + len(change) :]))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(
            [
                caught(0, 4),
                status(1, 3, 3),
                "[rank0]:",
                "WorkNCCL(SeqNum=",
                "[Rank 9",
                "]",
                "\n",
                "last enqueued NCCL work: ",
                "watchdog got stuck for",
                "99999999999999999999999",
            ]
        )
    )
)
def test_no_line_is_so_broken_that_reading_it_fails(parts: list[str]) -> None:
    log = parse_log(["NCCL INFO x", *"".join(parts).splitlines()], "fuzz")
    assert log is not None
    examine(log)
