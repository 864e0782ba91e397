"""`python -m commopt doctor`: what it prints, its exit status, what it refuses; and the small parts beneath it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from commopt.__main__ import main
from commopt.cost import Curve, Header, LinkKey, Links
from commopt.doctor.cli import as_json, measured, run, show
from commopt.doctor.finding import Check, Finding, Severity, error, exit_status, ok, unread
from commopt.doctor.network import DeviceList
from tests.doctor_machine import look, rdma_server, tcp_server

CHECK: Check[object] = Check("memlock", "Locked memory", "/proc/self/limits", "unlimited", lambda machine: ())
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


def test_a_finding_is_printed_with_all_its_parts() -> None:
    text = printed([BAD, FINE])
    for part in (
        "ERROR",
        "Locked memory",
        "memlock",
        "/proc/self/limits",
        "64 KiB",
        "unlimited",
        "ulimit -l unlimited",
    ):
        assert part in text
    assert "1 error(s), 0 warning(s), 0 note(s), 1 fine, 0 not read" in text


def test_fine_is_printed_on_request_and_unread_always() -> None:
    assert "OK" not in printed([FINE])
    assert "OK" in printed([FINE], everything=True)
    assert "Not checked" in printed([UNREAD])
    assert "(try: ulimit -l)" in printed([UNREAD])


def test_without_rich_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [BAD, FINE, UNREAD]
    text = printed(findings, everything=True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert printed(findings, everything=True) == text


def test_a_remedy_stays_on_one_line() -> None:
    command = "sudo sysctl -w " + " ".join(f"net.core.option_{place}=1" for place in range(20))
    assert any(line.endswith(command) for line in printed([CHECK.named(error("y", "z", command))]).splitlines())


def test_json_has_every_field() -> None:
    answer = json.loads(as_json([BAD, UNREAD]))
    assert answer["status"] == 3
    assert answer["counts"] == {"error": 1, "warning": 0, "info": 1, "ok": 0}
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


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ([], 0),
        ([Severity.OK, Severity.INFO], 0),
        ([Severity.WARNING, Severity.OK], 1),
        ([Severity.INFO, Severity.ERROR], 3),
    ],
)
def test_the_worst_severity_decides_the_exit_status(severities: list[Severity], status: int) -> None:
    assert exit_status([Finding("x", "x", severity, "x", "x", "x") for severity in severities]) == status


def test_the_exit_status_of_whole_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--root", str(rdma_server(tmp_path / "ib").root), "--all"]) == 0
    assert "nothing that was read makes communication slow" in capsys.readouterr().out
    tcp = str(tcp_server(tmp_path / "tcp").root)
    assert main(["doctor", "--root", tcp]) == 1
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["doctor", "--root", tcp, "--json"]) == 3
    output = capsys.readouterr().out
    answer = json.loads(output[output.index("{\n") :])
    assert answer["findings"][0]["read"] == "NCCL_P2P_DISABLE"
    assert {finding["confidence"] for finding in answer["findings"]} <= CONFIDENT


@pytest.mark.parametrize(("gbps", "status", "severity"), [(400.0, 0, "ok"), (100.0, 1, "warning")])
def test_what_was_measured_is_held_against_the_line_rate(
    gbps: float, status: int, severity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An all_reduce of two nodes sends each byte once.
    curve = Curve.fit((nbytes, 8e-3 * nbytes / gbps) for nbytes in (1 << 20, 1 << 26))
    links = Links(Header(nodes=(1, 1), hosts=("a", "b")), {LinkKey("inter", "all_reduce", 2): curve})
    links.save(tmp_path / "links.json")
    root = str(rdma_server(tmp_path / "ib").root)
    assert main(["doctor", "--json", "--root", root, "--links", str(tmp_path / "links.json")]) == status
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (findings["measured"]["severity"], f"{gbps:g} of 800 Gb/s" in findings["measured"]["value"]) == (
        severity,
        True,
    )


def test_figures_that_say_nothing_of_the_network_are_told_so(tmp_path: Path) -> None:
    machine = look(rdma_server(tmp_path))
    curves = {LinkKey("inter", "all_reduce", 2): Curve.fit((nbytes, nbytes) for nbytes in (1 << 20, 1 << 26))}
    emulated = Header(nodes=(1, 1), command="BENCH_CLUSTER_RATE=1gbit python -m commopt probe")
    for links in (
        Links(Header(nodes=(2,)), {}),
        Links(Header(nodes=(1, 1)), curves, nominal=True),
        Links(emulated, curves),
    ):
        (found,) = measured((machine, links, "links.json"))
        assert found.value is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--links", "/no/such/file"],
        ["doctor", "--root", "/no/such/folder"],
        ["doctor", "--nonsense"],
        ["docto"],
        [],
        ["doctor", "--log"],
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


def test_the_live_machine_can_be_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--all", "--json"]) in (0, 1, 2)
    checks = {finding["check"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert {"memlock", "shm", "interface", "versions", "peer-access", "counters"} <= checks


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m commopt doctor --all --json --root {tcp_server(tmp_path).root} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_explains_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "exit status" in capsys.readouterr().out
    assert run.__doc__


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


def test_a_whole_name_that_begins_another_is_noticed() -> None:
    names = ["mlx5_1", "mlx5_10", "mlx5_2"]
    assert DeviceList.parse("mlx5_1").stretched(names) == ["mlx5_10"]
    assert DeviceList.parse("mlx5_1,mlx5_10").stretched(names) == []
    for meant in ("mlx5", "=mlx5_1", "^mlx5_1", ""):
        assert DeviceList.parse(meant).stretched(names) == []


def test_a_list_of_adapters_may_name_ports() -> None:
    pattern = DeviceList.parse("=mlx5_0:2,mlx5_1")
    assert not pattern.selects("mlx5_0", 1)
    assert pattern.selects("mlx5_0", 2)
    assert pattern.selects("mlx5_1", 1)
    assert pattern.unmatched(["mlx5_0"]) == ["mlx5_1"]
