# SPDX-License-Identifier: Apache-2.0
"""Reading the matrix of `nvidia-smi topo -m`, whole, quoted and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.matrices import CUBE_MESH, LEGEND, all_pairs, matrix, wired
from topology.files import MAX_BYTES, read
from topology.matrix import NO_LEGEND, read_matrix
from topology.model import Distance, NvLinks, Topology, TopologyError
from topology.queries import gpu_distance, links_per_gpu, nearest_nics, nic_distance, nvlink_kind
from topology.text import summary

FIXTURES = Path(__file__).parent / "topologies"
AFFINITY = {"CPU Affinity": ["0-7", "8-15"], "NUMA Affinity": ["0", "1"]}


def read_text(text: str) -> Topology:
    return read_matrix(text, "m.txt")


def refusal(text: str) -> str:
    with pytest.raises(TopologyError) as caught:
        read_text(text)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("m.txt:")
    return message


def nearest(topology: Topology, gpu: int) -> tuple[list[str], Distance] | None:
    found = nearest_nics(topology, gpu)
    return found and ([topology.nics[place].name for place in found[0]], found[1])


def test_colours_tabs_and_legend() -> None:
    topology = read(FIXTURES / "matrix_switch_colours.txt")
    assert [gpu.index for gpu in topology.gpus] == [0, 1, 2, 3]
    assert [gpu.numa for gpu in topology.gpus] == [0, 0, 1, 1]
    assert topology.gpus[2].affinity == "32-63,96-127"
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "bnxt_re0"]
    assert all(nic.speed_gbps is None and nic.busid is None and nic.numa is None for nic in topology.nics)
    assert topology.nvlinks == tuple(NvLinks(gpu, None, 18, kind="switch") for gpu in range(4))
    assert gpu_distance(topology, 0, 3) is Distance.NVL
    assert [nearest(topology, gpu) for gpu in range(4)] == [
        ([name], Distance.PIX) for name in ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5")
    ]
    assert nic_distance(topology, 3, 4) is Distance.NODE
    assert [(cpu.numa, len(cpu.affinity or ())) for cpu in topology.cpus] == [(0, 64), (1, 64)]
    assert topology.warnings == ()
    assert topology.source.startswith("nvidia-smi matrix ")


def test_old_driver_with_blanks_and_windows_line_ends() -> None:
    topology = read(FIXTURES / "matrix_cube_mesh_old_driver.txt")
    assert [nic.name for nic in topology.nics] == ["mlx5_2", "mlx5_0"]
    assert gpu_distance(topology, 0, 5) is Distance.SYS, "SOC was the word for SYS"
    assert nearest(topology, 1) == (["mlx5_0"], Distance.PIX)
    assert nearest(topology, 4) == (["mlx5_2"], Distance.PHB)
    assert [gpu.numa for gpu in topology.gpus] == [None] * 8
    assert topology.gpus[7].affinity == "20-39,60-79"
    assert topology.warnings == ()


def test_comment_in_a_script() -> None:
    topology = read(FIXTURES / "matrix_mesh_in_a_script.txt")
    assert [gpu.numa for gpu in topology.gpus] == [3, 1, 7, 5]
    assert nearest(topology, 1) == (["mlx5_1"], Distance.PIX)
    assert nearest(topology, 2) == (["mlx5_0", "mlx5_1"], Distance.SYS)
    assert topology.nvlinks is not None
    assert NvLinks(0, 3, 4, kind="gpu") in topology.nvlinks
    assert topology.warnings == ()


def test_container_with_literal_colours_and_a_gap_in_the_legend() -> None:
    topology = read(FIXTURES / "matrix_container.txt")
    assert [nic.name for nic in topology.nics] == ["rocep1s0f0", "NIC1"]
    assert [(gpu.numa, gpu.affinity) for gpu in topology.gpus] == [(None, None)] * 2
    assert nearest(topology, 0) == (["rocep1s0f0"], Distance.PHB)
    assert topology.nvlinks == ()
    assert topology.warnings == ("the NIC legend names no NIC1: called by their columns",)


@pytest.mark.parametrize("colour", ["\x1b[4m", "[4m", "^[[1;4m", "\\x1b[4m", "\\033[4m"])
def test_every_spelling_of_a_colour_code(colour: str) -> None:
    text = matrix(2, all_pairs("PIX")).replace("GPU", colour + "GPU")
    assert read_text(text).stated == (("GPU0", "GPU1", Distance.PIX),)


@pytest.mark.parametrize(
    "quote",
    [
        lambda number, line: f"# {line}",
        lambda number, line: f"> {line}",
        lambda number, line: f"node07: {line}",
        lambda number, line: f"worker-1  | {line}",
        lambda number, line: f"2026-01-02T03:04:{number % 60:02}Z {line}",
        lambda number, line: f"{line}\n",
        lambda number, line: line.expandtabs(8),
        lambda number, line: "  " + " ".join(line.split()),
        lambda number, line: f"{line}\r",
        lambda number, line: '   "' + line.replace("\t", "\\t") + '\\n",',
        lambda number, line: line.replace("\t", "\\t") + "\\n\\",
    ],
)
def test_ways_in_which_a_matrix_is_quoted(quote) -> None:
    plain = matrix(2, wired({(0, 1): 4}, "NODE"), ["NIC0", "NIC1"], AFFINITY)
    plain += "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n"
    quoted = "\n".join(quote(number, line) for number, line in enumerate(plain.split("\n")))
    assert read_text("Title\n\n" + quoted) == read_text(plain)
    assert [nic.name for nic in read_text(quoted).nics] == ["mlx5_0", "mlx5_bond_0"]


def test_a_matrix_in_one_line_of_json() -> None:
    plain = matrix(2, wired({(0, 1): 4}, "NODE"), ["NIC0"], AFFINITY) + "NIC Legend:\n\n  NIC0: mlx5_0\n"
    assert read_text(json.dumps({"topo": plain})) == read_text(plain)


def test_columns_after_the_devices_are_found_by_their_place_where_values_are_missing() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPHB\t\t\t1\t\tN/A\nGPU1\tPHB\t X \t0-7\n"
    first, second = read_text(text).gpus
    assert (first.affinity, first.numa) == (None, 1)
    assert (second.affinity, second.numa) == ("0-7", None)


def affinities(text: str) -> list[tuple[str | None, int | None]]:
    return [(gpu.affinity, gpu.numa) for gpu in read_text(text).gpus]


TRAY = {
    "CPU Affinity": ["0-35", "0-35", "", ""],
    "NUMA Affinity": ["0\t", "0\t", "1\t", "1\t"],
    "GPU NUMA ID": ["N/A"] * 4,
}
"""Grace tray in a job that may use the CPUs of one node: nvidia-smi puts two tabs behind the NUMA node."""
CPUSET = {"CPU Affinity": ["0-15", ""], "NUMA Affinity": ["0", "1"]}


def test_an_empty_cell_of_cpus_shifts_nothing() -> None:
    tray = matrix(4, all_pairs("NV18"), ["NIC0"], TRAY)
    wanted = [("0-35", 0), ("0-35", 0), (None, 1), (None, 1)]
    assert affinities(tray) == wanted
    assert affinities(tray.replace("N/A", "10")) == wanted
    assert read_text(tray).warnings == ()
    pair = matrix(2, all_pairs("SYS"), affinity=CPUSET)
    assert affinities(pair) == [("0-15", 0), (None, 1)]
    assert affinities(pair.replace("0-15", "3")) == [("3", 0), (None, 1)]


def test_values_that_could_be_of_several_columns_are_unknown_and_named() -> None:
    tray = matrix(4, all_pairs("NV18"), affinity=TRAY)
    squeezed = "\n".join(" ".join(line.split()) for line in tray.splitlines())
    cut = matrix(2, all_pairs("SYS"), affinity=CPUSET | {"GPU NUMA ID": ["\tN/A"] * 2}).replace("\tGPU NUMA ID", "")
    no_titles = matrix(2, all_pairs("SYS"), affinity=CPUSET).replace("\tCPU Affinity\tNUMA Affinity", "")
    lost = matrix(
        2,
        all_pairs("SYS"),
        affinity={"CPU Affinity": ["", "0-7"], "NUMA Affinity": ["\t\t\t1", "0"], "GPU NUMA ID": ["", "N/A"]},
    )
    for text, wanted in (
        (squeezed, [("0-35", 0), ("0-35", 0), (None, None), (None, None)]),
        ("GPU0 GPU1 CPU Affinity NUMA Affinity\nGPU0 X NV4 0-51 0\nGPU1 NV4 X 1\n", [("0-51", 0), (None, None)]),
        (cut, [("0-15", 0), (None, None)]),
        (no_titles, [(None, None), (None, None)]),
        (lost, [(None, None), ("0-7", 0)]),
    ):
        assert affinities(text) == wanted
        assert "affinity unknown where it cannot be told" in " ".join(read_text(text).warnings)


@pytest.mark.parametrize(
    "titles",
    ["CPU Affinity\tNUMA", "CPU\tNUMA\tGPU NUMA", "CPUs\tNUMA node\tGPU NUMA ID", "CPU_Affinity\tNUMA_Affinity"],
)
def test_titles_that_people_shorten(titles: str) -> None:
    values = ["0-7\t0\tN/A", "8-15\t1\tN/A"] if "GPU" in titles else ["0-7\t0", "8-15\t1"]
    text = matrix(2, all_pairs("SYS"), affinity={titles: values})
    assert affinities(text) == [("0-7", 0), ("8-15", 1)]
    assert read_text(text).warnings == ()


def test_titles_that_are_not_known_are_named() -> None:
    text = matrix(2, all_pairs("SYS"), affinity={"CPU Affinity": ["0-7", "8-15"], "Socket": ["0", "1"]})
    assert affinities(text) == [("0-7", None), ("8-15", None)]
    assert read_text(text).warnings == ("line 1: 'Socket' is no column known here: not read",)


def test_a_wrapped_matrix_is_refused() -> None:
    rows = "".join(
        f"GPU{a}\t" + "\t".join(" X " if a == b else "NV4" for b in range(2)) + "\n\tPIX\t0-7\t0\n" for a in range(2)
    )
    assert "wrapped" in refusal("\tGPU0\tGPU1\n\tNIC0\tCPU Affinity\tNUMA Affinity\n" + rows)


def test_a_list_of_cpus_with_blanks_is_one_value() -> None:
    text = matrix(2, all_pairs("SYS"), affinity={"CPU Affinity": ["0-3, 8-11", "4-7"], "NUMA Affinity": ["0", "1"]})
    assert [(gpu.affinity, gpu.numa) for gpu in read_text(text).gpus] == [("0-3,8-11", 0), ("4-7", 1)]


def test_of_a_list_of_numa_nodes_the_first_is_that_of_the_cpus() -> None:
    affinity = {"CPU Affinity": ["0-71", "72-143"], "NUMA Affinity": ["0,2-9", "1"], "GPU NUMA ID": ["2", "N/A"]}
    topology = read_text(matrix(2, all_pairs("NV18"), affinity=affinity))
    assert [gpu.numa for gpu in topology.gpus] == [0, 1]
    assert [(cpu.numa, len(cpu.affinity or ())) for cpu in topology.cpus] == [(0, 72), (1, 72)]
    assert [gpu.affinity for gpu in topology.gpus] == ["0-71", "72-143"]
    assert any("GPU0 0,2-9" in warning and "first" in warning for warning in topology.warnings)
    grace = {"CPU Affinity": ["0-71"] * 2 + ["72-143"] * 2, "NUMA Affinity": ["0,3-9"] * 2 + ["1,19-25"] * 2}
    assert [gpu.numa for gpu in read_text(matrix(4, all_pairs("NV18"), affinity=grace)).gpus] == [0, 0, 1, 1]


@pytest.mark.parametrize("cpus", [["0-71", "0-71"], ["N/A", "N/A"]])
def test_lists_of_numa_nodes_that_no_cpus_tell_apart_stay_unknown(cpus: list[str]) -> None:
    affinity = {"CPU Affinity": cpus, "NUMA Affinity": ["0,2-9", "1,3-4"]}
    topology = read_text(matrix(2, all_pairs("NV18"), affinity=affinity))
    assert [gpu.numa for gpu in topology.gpus] == [None, None]
    assert any("NUMA unknown for these" in warning for warning in topology.warnings)


def test_damaged_and_different_cpu_lists_are_reported_and_kept_as_text() -> None:
    affinity = {"CPU Affinity": ["-31", "2-31", "0-31"], "NUMA Affinity": ["0", "1", "1"]}
    topology = read_text(matrix(3, all_pairs("SYS"), affinity=affinity))
    assert [gpu.affinity for gpu in topology.gpus] == ["-31", "2-31", "0-31"]
    assert [cpu.affinity for cpu in topology.cpus] == [None, None]
    assert topology.warnings == (
        "CPU Affinity '-31' of GPU0 is damaged",
        "CPU Affinity differs on NUMA node 1: 2-31 (GPU1) and 0-31 (GPU2)",
    )


def test_a_cut_matrix_uses_symmetry_and_says_what_is_missing() -> None:
    whole = matrix(8, wired(CUBE_MESH)).splitlines()
    topology = read_text("\n".join(whole[:4]))
    assert len(topology.gpus) == 8
    assert gpu_distance(topology, 7, 1) is Distance.SYS
    assert gpu_distance(topology, 2, 6) is Distance.NVL
    assert gpu_distance(topology, 3, 7) is None
    assert topology.nvlinks is None
    assert topology.warnings == (
        "only 3 of 8 GPU rows present: the text is cut",
        "NVLinks are unknown: the connections of some GPUs are missing",
    )


def test_one_row_is_enough_to_know_a_switch() -> None:
    topology = read_text("\n".join(matrix(8, all_pairs("NV18")).splitlines()[:2]))
    assert topology.nvlinks == tuple(NvLinks(gpu, None, 18, kind="switch") for gpu in range(8))


FUSED = matrix(2, all_pairs("NODE"), ["NIC0", "NIC10", "NIC11"]).replace("NIC10\tNIC11\n", "NIC10NIC11\n", 1)
TWO_NICS = matrix(2, all_pairs("NODE"), ["NIC0", "NIC1"]).replace("\tNIC0\tNIC1\n", "\n", 1)
LAST_CELLS = matrix(3, all_pairs("PIX")).replace("GPU2\tPIX\tPIX", "GPU2\tPIX\t")
PLAIN = matrix(2, all_pairs("PIX"), legend="")


@pytest.mark.parametrize(
    ("text", "distances", "warning"),
    [
        (
            FUSED.replace("GPU0\t X \tNODE\tNODE", "GPU0\t X NODENODE", 1),
            {"GPU0-NIC2": "NODE"},
            "line 1: fused header labels were split",
        ),
        (
            matrix(3, all_pairs("NODE")).replace("GPU1\tNODE\t X \tNODE", "GPU1\tNODE\t X "),
            {"GPU1-GPU2": "NODE"},  # the other row has it
            "line 3: GPU1 has 2 of 3 cells",
        ),
        (
            matrix(3, wired({(0, 1): 2}, "PIX")).replace("GPU2\tPIX\tPIX\t X ", "GPU2\tPIX\t X "),
            {"GPU1-GPU2": "PIX"},
            "line 4: X is not in the column of GPU2, so cells are missing: left out",
        ),
        (
            LAST_CELLS.replace("GPU1\tPIX\t X \tPIX", "GPU1\tPIX\t X \t"),
            {"GPU0-GPU2": "PIX", "GPU1-GPU2": None},
            "line 3: GPU1 has 2 of 3 cells",
        ),
        (
            matrix(3, all_pairs("PIX")).replace("GPU0\t X \tPIX", "GPU0\t X \tSYS"),
            {"GPU0-GPU1": None, "GPU0-GPU2": "PIX"},
            "rows contradict each other, taken as unknown: GPU0-GPU1 PIX or SYS",
        ),
        (PLAIN + "GPU1\tSYS\t X \n", {"GPU0-GPU1": "PIX"}, "line 4: another row for GPU1: left out"),
        (
            matrix(3, all_pairs("PIX")).replace("GPU0\t X \tPIX\tPIX", "GPU0\t X \tWEB\tPIX"),
            {"GPU0-GPU1": "PIX"},
            "line 2: 'WEB' is no connection: taken as unknown",
        ),
        (PLAIN + "GPU0 is slow\nGPU1 and GPU0 share a switch\nNIC0 NIC1 are down\n", {"GPU0-GPU1": "PIX"}, NO_LEGEND),
        (PLAIN + matrix(2, all_pairs("OK"), legend="  X    = Self\n"), {"GPU0-GPU1": "PIX"}, NO_LEGEND),
        (
            TWO_NICS.replace("NODE\tNODE\tNODE\nGPU1", "NODE\nGPU1").replace("X \tNODE\tNODE\nNIC0", "X \nNIC0"),
            {"GPU0-GPU1": "NODE"},
            "line 4: no column in the header for NIC0, NIC1: left out",
        ),
        (
            matrix(2, all_pairs("NODE"), ["NIC0"]).replace("\tNIC0\n", "\n", 1),
            {"GPU0-GPU1": "NODE"},
            "line 2: 1 more cell(s) than the header has columns: left out",
        ),
        (
            "76 NICs found in the topology, only displaying 56 in the matrix.\n" + PLAIN,
            {"GPU0-GPU1": "PIX"},
            "nvidia-smi found 76 NICs but shows 56: the others are missing here",
        ),
        (
            matrix(1, all_pairs("NODE"), ["NIC0", "NIC1"]) + "NIC Legend:\n  NIC0: mlx5_0\n  NIC1: mlx5_0\n",
            {"GPU0-NIC0": "NODE"},
            "the NIC legend gives one name to several NICs: all are called by their columns",
        ),
        (
            matrix(4, lambda a, b: "NODE" if b == 3 else "NV18"),
            {"GPU0-GPU3": "NODE"},
            "no NVLink at GPU3, though others are on an NVSwitch: see `nvidia-smi nvlink -s`",
        ),
    ],
)
def test_damage_is_said_and_shifts_no_distance(
    text: str, distances: dict[str, str | None], warning: str | None
) -> None:
    topology = read_text(text)
    stated = {f"{a}-{b}": distance.value for a, b, distance in topology.stated or ()}
    assert {pair: stated.get(pair) for pair in distances} == distances
    assert topology.warnings[:1] == (() if warning is None else (warning,)) or warning in topology.warnings


def test_a_title_lost_inside_the_header_shifts_no_distance() -> None:
    near = {(0, 4): "PIX", (1, 5): "PIX", (2, 6): "PIX", (3, 7): "PIX"}
    nics = [f"NIC{n}" for n in range(4)]
    text = matrix(4, lambda a, b: near.get((a, b), "SYS"), nics).replace("\tNIC1\t", "\t", 1)
    topology = read_text(text)
    assert [nic_distance(topology, gpu, 0) for gpu in range(4)] == [Distance.PIX, *[Distance.SYS] * 3]
    assert {nic_distance(topology, gpu, nic) for gpu in range(4) for nic in (1, 2)} == {None}
    assert gpu_distance(topology, 0, 3) is Distance.SYS


def test_a_cell_lost_inside_a_row_shifts_no_distance() -> None:
    near = {(0, 2): "PIX", (1, 3): "PIX"}
    text = matrix(2, lambda a, b: near.get((a, b), "SYS"), ["NIC0", "NIC1"], AFFINITY).expandtabs(8)
    text = text.replace("GPU1    SYS      X      SYS     PIX", "GPU1    SYS      X      PIX")
    topology = read_text(text)
    assert nearest(topology, 0) == (["NIC0"], Distance.PIX)
    assert nearest(topology, 1) == (["NIC1"], Distance.PIX), "the rows of the NICs have it"
    without = read_text("\n".join(line for line in text.splitlines() if not line.startswith("NIC")))
    assert nearest(without, 1) is None
    assert any("GPU1 has 2 of 4 cells" in warning for warning in without.warnings)


def test_the_first_of_several_matrices_is_read() -> None:
    p2p = matrix(2, all_pairs("OK"))
    topology = read_text(p2p + matrix(2, all_pairs("PIX")) + matrix(2, all_pairs("SYS")))
    assert topology.stated == (("GPU0", "GPU1", Distance.PIX),)
    first, second = p2p.count("\n") + 1, 2 * p2p.count("\n") + 1
    assert topology.warnings == (f"another matrix begins at line {second}: only the one at line {first} is read",)


def test_a_legend_without_nvlink_is_suspicious() -> None:
    legend = LEGEND.replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", "")
    hidden = read_text(matrix(2, all_pairs("SYS"), legend=legend))
    assert "topo -mp" in " ".join(hidden.warnings)
    assert hidden.nvlinks is None
    assert gpu_distance(hidden, 0, 1) is Distance.SYS
    asked = read_text("$ nvidia-smi topo -mp\n" + matrix(2, all_pairs("SYS"), legend=""))
    assert (asked.nvlinks, asked.warnings) == (None, hidden.warnings)
    old = legend.replace("SYS", "SOC")
    assert read_text(matrix(2, all_pairs("SOC"), legend=old)).nvlinks == ()
    # Without a legend, or with a cut one, nothing tells.
    for rest in ("", LEGEND[: LEGEND.index("  PIX")]):
        nothing = read_text(matrix(2, all_pairs("SYS"), legend=rest))
        assert (nothing.nvlinks, nothing.warnings) == ((), (NO_LEGEND,))


@pytest.mark.parametrize("command", ["nvidia-smi topo -m", "nvidia-smi topo --matrix"])
def test_the_command_above_counts_more_than_a_cut_legend(command: str) -> None:
    for rest in (
        "",
        "\n  X    = Self\n",
        LEGEND.replace("  NV#  = Connection traversing a bonded set of # NVLinks\n", ""),
    ):
        topology = read_text(f"$ {command}\n" + matrix(2, all_pairs("SYS"), legend=rest))
        assert (topology.nvlinks, topology.warnings) == ((), ())


@pytest.mark.parametrize("command", ["nvidia-smi topo -mp", "nvidia-smi topo --matrix_pci"])
def test_a_matrix_of_pcie_alone_hides_nvlinks(command: str) -> None:
    topology = read_text(f"$ {command}\n" + matrix(2, all_pairs("SYS"), legend=""))
    assert (nvlink_kind(topology), "topo -mp" in " ".join(topology.warnings)) == ("unknown", True)


LEGENDS = [
    "  NIC0: mlx5_0 -> ib0\n  NIC1: mlx5_1 -> ib1\n",
    "  NIC0: mlx5_0   NIC1: mlx5_1\n",
    "  NIC0: mlx5_0, NIC1: mlx5_1\n",
    "  NIC0: mlx5_0 (Up)\n  NIC1: mlx5_1 (Down)\n",
    "  NIC0 = mlx5_0 # storage\n  NIC1 = mlx5_1\n",
    "  NIC0 -> mlx5_0\n  NIC1 -> mlx5_1\n",
    "  NIC0: mlx5_0; NIC1: mlx5_1;\n",
]


@pytest.mark.parametrize("legend", LEGENDS)
def test_ways_in_which_people_write_the_nics(legend: str) -> None:
    topology = read_text(matrix(2, all_pairs("SYS"), ["NIC0", "NIC1"]) + "NIC Legend:\n\n" + legend)
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1"]
    assert topology.warnings == ()


def test_a_nic_legend_of_words_is_not_lost_in_silence() -> None:
    words = "NIC Legend:\n  NIC0: is the one for storage\n  NIC1: is the other\n"
    topology = read_text(matrix(2, all_pairs("SYS"), ["NIC0", "NIC1"]) + words)
    assert [nic.name for nic in topology.nics] == ["NIC0", "NIC1"]
    assert "the NIC legend cannot be read (NIC0, NIC1): called by their columns" in topology.warnings


TITLES = ["\tCPU Affinity", "\tNUMA Affinity", "\tGPU NUMA ID"]


@pytest.mark.parametrize(
    "fused",
    [
        "\tCPU AffinityNUMA Affinity\tGPU NUMA ID",
        "\tCPU Affinity\tNUMA AffinityGPU NUMA ID",
        "\tCPU AffinityNUMA AffinityGPU NUMA ID",
        "CPU Affinity\tNUMA Affinity\tGPU NUMA ID",
        "CPUAffinityNUMAAffinityGPU NUMA ID",
    ],
)
def test_titles_that_ran_into_each_other_are_split(fused: str) -> None:
    affinity = {"CPU Affinity": ["0-7", "8-15"], "NUMA Affinity": ["0", "1"], "GPU NUMA ID": ["N/A", "N/A"]}
    whole = matrix(2, all_pairs("SYS"), ["NIC0"], affinity)
    topology = read_text(whole.replace("".join(TITLES), fused))
    assert [(gpu.numa, gpu.affinity) for gpu in topology.gpus] == [(0, "0-7"), (1, "8-15")]
    assert [nic.name for nic in topology.nics] == ["NIC0"]
    assert topology.warnings == ("line 1: fused header labels were split",)


def test_rows_without_a_header_above_a_matrix_are_not_dropped_in_silence() -> None:
    headless = "".join(matrix(4, all_pairs("NV18"), legend="").splitlines(keepends=True)[1:])
    topology = read_text(f"node1\n{headless}\nnode2\n" + matrix(2, all_pairs("SYS")))
    assert len(topology.gpus) == 2
    assert topology.warnings == ("line 2: rows of a matrix without a header above them: not read",)


def test_two_gpus_with_many_links_may_be_on_a_switch() -> None:
    assert read_text(matrix(2, all_pairs("NV4"))).warnings == ()
    topology = read_text(matrix(2, all_pairs("NV12")))
    assert "bridge" in " ".join(topology.warnings)
    assert (nvlink_kind(topology), links_per_gpu(topology)) == ("unknown", (12, 12))
    assert gpu_distance(topology, 0, 1) is Distance.NVL
    assert "12 NVLinks per GPU, directly or through switches" in summary(topology)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (matrix(2, all_pairs("CNS")), "m.txt:2: 'CNS' is no connection (NV#, PIX, PXB, PHB, NODE, SYS): this is `nvid"),
        ("\tGPU0\tGPU1\n\nLegend:\n", "m.txt:1: the header of a matrix without rows below it"),
        ("GPU0\t X \tNV4\nGPU1\tNV4\t X \n", "m.txt:1: rows of a matrix, but no header line"),
        ("\n| | GPU0 | GPU1 |\n|--|--|--|\n| GPU0 | X | PIX |\n", "m.txt:2: a table drawn with |"),
        ("\tGPU0\tGPU1\tNIC0\nNIC0\tSYS\tSYS\t X \n", "m.txt:1: a header for 2 GPU(s), but no row of a GPU"),
        ("No devices were found\n", "m.txt:1: nvidia-smi found no GPU"),
        ("NVIDIA-SMI has failed because it couldn't\n", "m.txt:1: nvidia-smi could not reach the driver"),
        ("+---+\n| NVIDIA-SMI 570.1   CUDA |\n", "m.txt:2: this is the overview"),
        ("hello\n", "m.txt: no header line with GPU0 GPU1"),
        ("\t" + "\t".join(f"GPU{n}" for n in range(65)) + "\nGPU0\tX\n", "m.txt:2: rows of a matrix, but no header"),
    ],
)
def test_other_texts_are_refused_with_what_they_are(text: str, message: str) -> None:
    refused = refusal(text)
    assert refused.startswith(message)
    assert refused.endswith("`nvidia-smi topo -m`")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"\x7fELF\x00\x01", "is a binary file"),
        (b"{}", "no header line"),
        (b"<html></html>", "root element is <html>"),
        (b"x" * (MAX_BYTES + 1), "is larger than 16 MiB"),
    ],
)
def test_files_that_are_no_topology(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(content)
    with pytest.raises(TopologyError, match=message) as caught:
        read(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"cannot be read \(No such file or directory\); check the path"):
        read(tmp_path / "absent")
    with pytest.raises(TopologyError, match="is not a plain file"):
        read(tmp_path)
    with pytest.raises(TopologyError, match="is not a plain file"):
        read("/dev/zero")
    with pytest.raises(TopologyError, match="cannot be read"):
        read("a\0b")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_windows_encodings(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "matrix.txt"
    file.write_bytes(matrix(2, all_pairs("NV4")).encode(encoding))
    assert read(file).nvlinks == (NvLinks(0, 1, 4, kind="gpu"), NvLinks(1, 0, 4, kind="gpu"))


XML = '<system version="1">\n <cpu numaid="3">\n  <pci busid="0000:01:00.0"><gpu dev="0"/></pci>\n </cpu>\n</system>\n'


@pytest.mark.parametrize("text", [f"```xml\n{XML}```\n", f"$ cat topo.xml\n{XML}", f"<details>\n{XML}</details>\n"])
def test_xml_with_other_text_around_it_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pasted"
    file.write_text(text)
    with pytest.raises(TopologyError, match="has other text around NCCL's XML; keep the part from <system to"):
        read(file)


def test_a_matrix_in_a_web_page(tmp_path: Path) -> None:
    file = tmp_path / "page"
    file.write_text(f"<details><summary>topo</summary>\n\n```\n{matrix(2, all_pairs('NV4'))}```\n</details>\n")
    assert read(file).nvlinks == (NvLinks(0, 1, 4, kind="gpu"), NvLinks(1, 0, 4, kind="gpu"))
