# SPDX-License-Identifier: Apache-2.0
"""`python -m topology` from end to end: tree, matrix, JSON, XML, and refused input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import plain, server
from topology.__main__ import main
from topology.matrix import read_matrix
from topology.text import matrix as matrix_lines

MATRIX = """\
        GPU0    GPU1    GPU2    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV4     NODE    PIX     0-15    0
GPU1    NV4      X      NODE    NODE    0-15    0
GPU2    NODE    NODE     X      NODE    0-15    0
NIC0    PIX     NODE    NODE     X

NIC Legend:

  NIC0: mlx5_7
"""


@pytest.fixture
def matrix(tmp_path: Path) -> str:
    file = tmp_path / "matrix.txt"
    file.write_text(MATRIX)
    return str(file)


def test_json_has_the_promised_shape(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", matrix, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    warnings = found.pop("warnings")
    assert isinstance(warnings, list)
    assert found == {
        "gpus": [
            {
                "index": index,
                "busid": None,
                "numa": 0,
                "nvlinks": links,
                "nearest_nics": ["mlx5_7"],
                "nearest_distance": distance,
            }
            for index, links, distance in ((0, 4, "PIX"), (1, 4, "NODE"), (2, 0, "NODE"))
        ],
        "nics": [{"name": "mlx5_7", "busid": None, "port": None, "numa": None, "speed_gbps": None}],
        "nvlink": "pairs",
        "node_nic_gbps": None,
    }


def test_json_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = server(tmp_path, gpus=2)
    tree.write("sys/module/nvidia_peermem/version", "1")
    assert main(["--json", "--root", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"][0] == {
        "index": 0,
        "busid": "0000:19:00.0",
        "numa": 0,
        "nvlinks": None,
        "nearest_nics": ["mlx5_0", "mlx5_1"],
        "nearest_distance": "PIX",
    }
    assert found["nics"][0] == {
        "name": "mlx5_0",
        "busid": "0000:1b:00.0",
        "port": 1,
        "numa": 0,
        "speed_gbps": 400.0,
    }
    assert (found["nvlink"], found["node_nic_gbps"]) == ("unknown", 800.0)


def test_no_network_ports_and_unknown_distances_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare.txt"
    bare.write_text("\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-3\t0\nGPU1\tPHB\t X \t0-3\t0\n")
    cut = tmp_path / "cut.txt"
    cut.write_text("\n".join(MATRIX.splitlines()[:2]))
    main(["show", str(bare), "--json"])
    assert [gpu["nearest_nics"] for gpu in json.loads(capsys.readouterr().out)["gpus"]] == [[], []]
    main(["show", str(cut), "--json"])
    assert [gpu["nearest_nics"] for gpu in json.loads(capsys.readouterr().out)["gpus"]] == [["NIC0"], None, None]


def test_the_text_has_tree_matrix_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = server(tmp_path, gpus=4)
    for name, value in (("width", 8), ("speed", "2.5 GT/s PCIe")):  # idle and narrow
        tree.write(f"sys/bus/pci/devices/0000:19:00.0/current_link_{name}", value)
    assert main(["--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "4 GPUs (H100 80GB HBM3) · NVLinks unknown · 5 network ports" in text
    assert "NUMA 1 · 64 CPUs (32-63,96-127) · GenuineIntel\n└─ switch 0000:37:00.0 · Gen5 x16\n   ├─ GPU 2" in text
    assert "   ├─ GPU 0 · 0000:19:00.0 · H100 80GB HBM3 · Gen5 x8 (of x16) · nearest mlx5_0, mlx5_1 (PIX)\n" in text
    assert "GPU0  X     PIX   SYS   SYS   PIX     PIX     SYS     SYS     NODE\n" in text


def test_a_wide_matrix_fits_the_screen() -> None:
    header = "\t".join(["", *(f"GPU{gpu}" for gpu in range(16)), *(f"NIC{nic}" for nic in range(8))])
    rows = [
        "\t".join([f"GPU{a}", *("X" if a == b else "NV18" for b in range(16)), *("NODE" for _ in range(8))])
        for a in range(16)
    ]
    nics = [
        "\t".join([f"NIC{a}", *("NODE" for _ in range(16)), *("X" if a == b else "NODE" for b in range(8))])
        for a in range(8)
    ]
    legend = ["NIC Legend:", "", *(f"  NIC{nic}: mlx5_adapter_{nic}" for nic in range(8))]
    text = "\n".join([header, *rows, *nics, "", *legend])
    lines = matrix_lines(read_matrix(text, "topo.txt"))
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("GPU15 ") for line in lines) == 3, "columns that are left follow below"
    cells = " ".join(line.partition(" ")[2] for line in lines if line.startswith("GPU15 ")).split()
    assert cells == ["NV18"] * 15 + ["X"] + ["NODE"] * 8


def test_the_matrix_counts_nvlinks(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", matrix]) == 0
    text = capsys.readouterr().out
    assert "GPU0  X     NV4   NODE  PIX\n" in text
    assert "├─ switches\n│  ├─ GPU 0 · nearest mlx5_7 (PIX)\n│  └─ mlx5_7\n" in text


def test_a_machine_without_gpu_from_the_shell(tmp_path: Path) -> None:
    plain(tmp_path)
    command = [sys.executable, "-m", "topology", "--root", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, encoding="ascii", env={"PYTHONIOENCODING": "ascii"}, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no GPUs" in done.stdout
    assert "eth0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "{folder}/absent.xml"], "absent.xml"),
        (["show", "{folder}/noise"], "noise"),
        (["show", "{folder}"], "not a plain file"),
        (["show"], "show needs a file"),
        (["show", "x", "--root", "/y"], "give one of them"),
        (["look"], "invalid choice"),
        (["--root", "{folder}/absent"], "is not a folder"),
        (["--root", "{folder}", "--plot", "{folder}/machine.doc"], ".svg, .png, .pdf"),
        (["--root", "{folder}", "--plot", "{folder}/absent/machine.svg"], "No such file"),
    ],
)
def test_refused_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    (tmp_path / "noise").write_bytes(b"\x00\x01GPU\n" * 50)
    try:
        status: object = main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert expected in err
