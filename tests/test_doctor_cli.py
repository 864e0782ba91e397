# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt doctor`: what it prints, its exit status, what it refuses; and the small parts beneath it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from commopt.__main__ import main
from commopt.doctor.cli import as_json, show
from commopt.doctor.finding import Check, Finding, error, ok, unread
from commopt.doctor.network import DeviceList
from tests.doctor_machine import rdma_server, tcp_server

CHECK: Check[object] = Check("memlock", "Locked memory", "/proc/self/limits", "unlimited", None, lambda machine: ())
BAD = CHECK.named(error("64 KiB", "unlimited", "ulimit -l unlimited"))
FINE = CHECK.named(ok("unlimited"))
UNREAD = CHECK.named(unread("absent", "ulimit -l"))
CONFIDENT = {"high", "medium", "low"}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_ALGO", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def printed(findings: list[Finding], everything: bool = False) -> str:
    stream = io.StringIO()
    show(findings, everything, stream=stream)
    return stream.getvalue()


def test_what_is_printed() -> None:
    text = printed([BAD, FINE, UNREAD])
    for part in ("ERROR Locked memory [memlock]", "/proc/self/limits", "64 KiB", "expected unlimited", "ulimit -l unl"):
        assert part in text
    assert "1 error(s), 0 warning(s), 0 note(s), 1 fine, 1 not read" in text
    assert "Not checked" in text
    assert "(try: ulimit -l)" in text
    assert "OK" not in text
    assert "OK" in printed([FINE], everything=True)


def test_without_rich_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [BAD, FINE, UNREAD]
    text = printed(findings, everything=True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert printed(findings, everything=True) == text


def test_a_report_fits_80_columns_and_its_commands_can_be_pasted() -> None:
    command = "sudo sysctl -w " + " ".join(f"net.core.option_{place}=1" for place in range(20))
    long = "a value of many words " * 12
    bad = replace(CHECK.named(error(long, long, f"{command}; read the lines before it; ls")), nodes=("a" * 20,) * 3)
    text = printed([bad, replace(UNREAD, expected=long)])
    assert max(map(len, text.splitlines())) <= 80
    pasted = " ".join(text.replace("\\\n", " ").split())
    assert f"remedy {command}; read the lines before it; ls" in pasted
    assert text.count("\\\n") > len(command) // 80


def test_what_is_not_there_is_not_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing"
    (nothing / "proc").mkdir(parents=True)
    main(["doctor", "--root", str(nothing), "--json", "--all"])
    answer = json.loads(capsys.readouterr().out)
    apply = {finding["check"]: finding["severity"] for finding in answer["findings"]}
    without = {"gdr-module", "gdr-level", "xid", "gpu-memory", "nvswitch", "peer-access", "ib-port", "roce-gid", "mtu"}
    assert {apply[name] for name in without} == {"not applicable"}
    assert answer["counts"]["not applicable"] == sum(one == "not applicable" for one in apply.values()) >= 15
    main(["doctor", "--root", str(nothing)])
    assert f"{answer['counts']['not applicable']} not applicable" in " ".join(capsys.readouterr().out.split())
    main(["doctor", "--root", str(rdma_server(tmp_path / "ib").root), "--json"])
    apply = {one["check"]: one["severity"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert {apply[name] for name in ("gdr-module", "ib-port", "ib-hca", "pcie-link")} == {"ok"}


def test_json_has_every_field() -> None:
    answer = json.loads(as_json([BAD, UNREAD]))
    assert answer["status"] == 3
    assert answer["counts"] == {"error": 1, "warning": 0, "info": 1, "ok": 0, "not applicable": 0}
    first, second = answer["findings"]
    assert first == {
        "check": "memlock",
        "title": "Locked memory",
        "severity": "error",
        "read": "/proc/self/limits",
        "value": "64 KiB",
        "expected": "unlimited",
        "remedy": "ulimit -l unlimited",
        "confidence": "high",
        "nodes": [],
    }
    assert second["value"] is None


def test_the_exit_status_of_whole_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--root", str(rdma_server(tmp_path / "ib").root), "--all"]) == 0
    assert "no cause of slow communication found" in " ".join(capsys.readouterr().out.split())
    tcp = str(tcp_server(tmp_path / "tcp").root)
    assert main(["doctor", "--root", tcp]) == 1
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["doctor", "--root", tcp, "--json"]) == 3
    output = capsys.readouterr().out
    answer = json.loads(output[output.index("{\n") :])
    assert answer["findings"][0]["read"] == "NCCL_P2P_DISABLE"
    assert {finding["confidence"] for finding in answer["findings"]} <= CONFIDENT


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--log", "/no/such/file"],
        ["doctor", "--root", "/no/such/folder"],
        ["doctor", "--nonsense"],
        ["docto"],
        [],
        ["doctor", "--log"],
        ["doctor", "--budget", "20"],
        ["doctor", "--batch", "8", "--json"],
        ["doctor", "--measure", "--root", "/no/such/folder"],
        ["doctor", "--measure", "--flight", "record.json"],
        ["doctor", "--measure", "--script"],
        ["doctor", "--measure", "--script", "-m"],
        ["doctor", "--script", "no_such_script.py"],
        ["doctor", "--script", "-m", "no_such_module"],
    ],
)
def test_bad_input_is_one_line_and_a_status_of_its_own(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1


def test_a_file_of_a_measurement_that_nobody_asked_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--html", "--save", "--compare"):
        assert main(["doctor", option, str(tmp_path / "file")]) == 2
        assert f"{option} is for what is measured, and nothing is; add --measure" in capsys.readouterr().err


def test_the_live_machine_can_be_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all", "--json"]) in (0, 1, 2)
    checks = {finding["check"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert {"memlock", "shm", "interface", "versions", "peer-access", "counters"} <= checks


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m commopt doctor --all --json --root {tcp_server(tmp_path).root} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("eth1", ["eth1", "eth10"]),
        ("^eth1", ["eth0", "lo"]),
        ("^=eth1,lo", ["eth0", "eth10"]),
        ("=eth0, lo", ["eth0", "lo"]),
        ("", ["eth0", "eth1", "eth10", "lo"]),
    ],
)
def test_lists_of_interfaces_are_read_as_nccl_reads_them(text: str, selected: list[str]) -> None:
    pattern = DeviceList.parse(text)
    assert [name for name in ("eth0", "eth1", "eth10", "lo") if pattern.selects(name)] == selected


def test_a_list_of_adapters_may_name_ports() -> None:
    pattern = DeviceList.parse("=mlx5_0:2,mlx5_1")
    assert not pattern.selects("mlx5_0", 1)
    assert pattern.selects("mlx5_0", 2)
    assert pattern.selects("mlx5_1", 1)
    assert pattern.unmatched(["mlx5_0"]) == ["mlx5_1"]
