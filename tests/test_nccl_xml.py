# SPDX-License-Identifier: Apache-2.0
"""NCCL's XML: what is read from it, what is said about it, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.machines import rail_machine
from topology.model import (
    Cpu,
    Distance,
    Gpu,
    Nic,
    NvLinks,
    PciDevice,
    PciLink,
    Topology,
    TopologyError,
    normalise_busid,
)
from topology.queries import gpu_distance, links_per_gpu, nearest_nics, node_nic_gbps, nvlink_kind
from topology.text import tree
from topology.xml_reader import read_nccl_xml

FIXTURES = Path(__file__).parent / "topologies"


def fixture(name: str) -> Topology:
    return read_nccl_xml((FIXTURES / name).read_bytes(), name)


def system(inside: str, attributes: str = 'version="1"') -> str:
    return f"<system {attributes}>{inside}</system>"


def in_cpu(inside: str) -> str:
    return system(f'<cpu numaid="0">{inside}</cpu>')


def near(topology: Topology, gpu: int) -> tuple[list[str], str] | None:
    found = nearest_nics(topology, gpu)
    return None if found is None else ([topology.nics[place].name for place in found[0]], found[1].value)


# What is read


def test_dump_with_switches() -> None:
    topology = fixture("switched_4gpu.xml")
    assert topology.source == "NCCL XML switched_4gpu.xml"
    assert topology.gpus[2] == Gpu(index=2, busid="0000:92:00.0", numa=1, sm=90)
    assert topology.nics[1] == Nic("mlx5_5", "0000:13:00.0", 2, 0, 200.0, link_layer="InfiniBand", gdr=True)
    assert topology.cpus[0] == Cpu(
        numa=0,
        arch="x86_64",
        vendor="GenuineIntel",
        affinity=(*range(16), *range(32, 48)),
    )
    assert topology.pci[2] == PciDevice(
        busid="0000:12:00.0",
        kind="gpu",
        parent="0000:11:00.0",
        cpu=0,
        pci_class=0x030200,
        link=PciLink(32.0, 16),
    )
    assert topology.nvlinks is not None
    assert topology.nvlinks[0] == NvLinks(0, None, 10, "0000:05:00.0", "switch")
    assert [near(topology, place) for place in range(4)] == [
        (["mlx5_4", "mlx5_5"], "PIX"),
        (["mlx5_4", "mlx5_5"], "PXB"),
        (["mlx5_0"], "PIX"),
        (["mlx5_0"], "PHB"),
    ]
    assert gpu_distance(topology, 0, 3) is Distance.NVL
    assert node_nic_gbps(topology) == 800.0
    assert [warning[:15] for warning in topology.warnings] == ["PHB may be NODE"]


def test_template_by_classes() -> None:
    topology = fixture("template_4gpu.xml")
    assert [(gpu.index, gpu.busid, gpu.numa) for gpu in topology.gpus] == [
        (3, "0004:00:00.0", 2),
        (2, "0003:00:00.0", 2),
        (0, "0001:00:00.0", 0),
        (1, "0002:00:00.0", 0),
    ]
    assert [nic.name for nic in topology.nics] == ["0103:00:00.0", "0101:00:00.0", "0102:00:00.0"]
    assert [nic.link_layer for nic in topology.nics] == ["InfiniBand", None, None]
    assert {nic.speed_gbps for nic in topology.nics} == {None}
    assert topology.pci[-1].kind == "other"
    assert topology.nvlinks is None
    assert topology.cpus[0].affinity == tuple(range(16, 28))
    assert near(topology, 2) == (["0101:00:00.0", "0102:00:00.0"], "PIX")
    assert near(topology, 3) == (["0101:00:00.0", "0102:00:00.0"], "PHB")
    assert node_nic_gbps(topology) is None
    assert [warning.split(":")[0] for warning in topology.warnings] == [
        "a template without <gpu>",
        "a template without <net>",
        "PHB may be NODE",
    ]


def test_pairs_bridges_and_ports_without_hardware() -> None:
    topology = fixture("pairs_with_veth.xml")
    assert [(gpu.index, gpu.busid) for gpu in topology.gpus[:2]] == [(1, "0000:3b:00.0"), (0, "0000:5e:00.0")]
    assert topology.nvlinks == (
        NvLinks(0, 1, 12, "0000:5e:00.0", "gpu"),
        NvLinks(1, 0, 12, "0000:3b:00.0", "gpu"),
        NvLinks(2, None, 12, "0000:d9:00.0", "gpu"),
    )
    assert "GPU 0000:d9:00.0, where NVLinks lead to, is not in the file" in topology.warnings
    assert [nic.virtual for nic in topology.nics] == [False, True, True]
    assert [device.link for device in topology.pci[1:3]] == [PciLink(None, None)] * 2
    assert near(topology, 0) == (["eno1"], "PHB")
    assert near(topology, 2) == (["eno1"], "SYS")
    assert node_nic_gbps(topology) == 25.0


def test_virtual_machine_of_several_hosts() -> None:
    topology = fixture("hidden_switch_vm.xml")
    assert [gpu.numa for gpu in topology.gpus] == [None, None]
    assert topology.cpus == (Cpu(numa=None, arch="arm64"),)
    assert gpu_distance(topology, 0, 1) is Distance.NVL
    assert near(topology, 1) == (["eth0"], "PHB")
    assert topology.nics[0].speed_gbps is None
    assert topology.warnings[:3] == (
        "the file describes 2 hosts (host_hash); only the first, '0x3f', is read",
        "line 6: GPU 0000:05:00.0 has a C2C link to its CPU, which is not kept",
        "line 15: no speed for 'eth0' (NCCL then assumes 10 Gb/s)",
    )


def test_ports_that_nccl_fused_count_once() -> None:
    topology = fixture("fused_nics.xml")
    assert [(nic.name, nic.virtual) for nic in topology.nics] == [
        ("mlx5_0+mlx5_1", True),
        ("mlx5_0", False),
        ("mlx5_1", False),
    ]
    assert node_nic_gbps(topology) == 400.0
    assert topology.nics[0].busid == "ffff:ff:01.0"


def test_what_joins_the_gpus_of_amd_is_unknown() -> None:
    link = '<xgmi target="0000:02:00.0" count="1" tclass="0x038000"/>'
    gpus = f'<pci busid="0000:01:00.0"><gpu>{link}</gpu></pci><pci busid="0000:02:00.0"><gpu/></pci>'
    topology = read_nccl_xml(in_cpu(gpus), "x")
    assert (topology.nvlinks, nvlink_kind(topology)) == (None, "unknown")
    assert any(warning.startswith("<xgmi> is AMD's") for warning in topology.warnings)


def test_a_gpu_that_is_not_on_the_switch_is_named() -> None:
    link = '<nvlink target="0000:09:00.0" count="18" tclass="0x068000"/>'
    gpus = f'<pci busid="0000:01:00.0"><gpu>{link}</gpu></pci><pci busid="0000:02:00.0"><gpu/></pci>'
    topology = read_nccl_xml(in_cpu(gpus), "x")
    assert links_per_gpu(topology) == (18, 0)
    assert gpu_distance(topology, 0, 1) is Distance.PHB
    assert (
        "no NVLink at GPU 0000:02:00.0, though others are on an NVSwitch: see `nvidia-smi nvlink -s`"
        in topology.warnings
    )


def test_nvlinks_that_lead_to_their_own_gpu_join_something_unknown() -> None:
    link = '<nvlink target="0000:0{}:00.0" count="12" tclass="0x030200"/>'
    gpus = "".join(f'<pci busid="0000:0{n}:00.0"><gpu>{link.format(n)}</gpu></pci>' for n in (1, 2))
    topology = read_nccl_xml(in_cpu(gpus), "x")
    assert (nvlink_kind(topology), links_per_gpu(topology)) == ("unknown", (12, 12))
    assert "NVLinks of GPU 0000:01:00.0 lead to itself: their other end is taken as unknown" in topology.warnings


def test_a_port_without_a_device_that_is_at_every_cpu_counts_once() -> None:
    nic = '<nic><net name="{}" speed="100000"/></nic>'
    cpus = "".join(f'<cpu numaid="{n}">{nic.format("eth0")}{nic.format("tunl0")}</cpu>' for n in (0, 1))
    topology = read_nccl_xml(system(cpus), "x")
    assert [(port.name, port.virtual) for port in topology.nics] == [("eth0", False), ("tunl0", True)]
    assert node_nic_gbps(topology) == 100.0
    assert "'eth0' is at several CPUs: counted once, at the first" in topology.warnings


def test_a_switch_id_used_twice_is_two_switches() -> None:
    topology = fixture("fused_nics.xml")
    assert [device.busid for device in topology.pci if device.kind == "switch"] == ["ffff:ff:01.0", "ffff:00:00.0"]
    assert topology.pci[0].pci_class == 0x060400
    assert gpu_distance(topology, 0, 1) is Distance.PHB
    assert "line 22: busid ffff:ff:01.0 is that of line 3 too; here it is ffff:00:00.0" in topology.warnings


def test_gpus_without_a_number_get_their_place_by_bus_id() -> None:
    pci = "".join(f'<pci busid="{busid}"><gpu/></pci>' for busid in ("10000:01:00.0", "0009:01:00.0", "0001:01:00.0"))
    assert [gpu.index for gpu in read_nccl_xml(in_cpu(pci), "x").gpus] == [2, 1, 0]


@pytest.mark.parametrize(
    "text",
    [
        '<?xml version="1.0" encoding="utf-16"?>\n' + in_cpu(""),
        "<!-- a -- b --->\n<?xml version='1.0'?><!-- c -->" + in_cpu(""),
        "\ufeff".encode() + in_cpu("").encode(),
        in_cpu("").encode("utf-16"),
        b"<!-- \xe9\xff -->" + in_cpu("").encode(),
        in_cpu("").replace("\n", "\r\n"),
    ],
)
def test_any_encoding_and_comment(text: str | bytes) -> None:
    assert read_nccl_xml(text, "x").cpus == (Cpu(numa=0),)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (system(""), "no GPU found"),
        (system("", ""), "line 1: version 'None': NCCL reads version 1 only"),
        (system("\n<cpus/>"), "line 2: <cpus> has no meaning here and is left out"),
        (in_cpu("<gpu/>"), "line 1: <gpu> has no meaning here and is left out"),
        (in_cpu('<pci busid="one"><gpu/></pci>'), "line 1: busid 'one' is no PCI bus id (like 0000:0f:00.0)"),
        (
            in_cpu('<pci busid="0000:01:00.0" link_speed="9 GT/s" class="0x030200"/>'),
            "line 1: <pci> link_speed='9 GT/s' is no PCIe speed; taken as unknown",
        ),
        (
            in_cpu('<pci busid="0000:01:00.0"><gpu dev="-1"/></pci>'),
            "line 1: <gpu> dev='-1' is not possible; taken as unknown",
        ),
        (
            in_cpu('<pci busid="0000:01:00.0"><gpu sm="9.x"/></pci>'),
            "line 1: <gpu> sm='9.x' is not a number; taken as unknown",
        ),
        (
            system('<cpu numaid="0" affinity="ffffffff0,1"/>'),
            "line 1: <cpu> affinity='ffffffff0,1' is no CPU mask; taken as unknown",
        ),
        (
            in_cpu('<pci busid="0000:01:00.0"><gpu><nvlink count="4"/></gpu></pci>'),
            "line 1: <nvlink> without target or count is left out",
        ),
        (
            in_cpu('<pci busid="0000:01:00.0"><gpu/></pci><pci busid="0000:02:00.0" class="0x030200"/>'),
            "0000:02:00.0: no <gpu>, so left out (NCCL did not use it)",
        ),
        (
            in_cpu('<pci busid="0000:01:00.0"><gpu mlopart="0"/><gpu mlopart="1"/></pci>'),
            "line 1: GPU 0000:01:00.0 is divided (mlopart); its parts are listed as GPUs",
        ),
    ],
)
def test_what_is_missing_or_strange_is_said(text: str, warning: str) -> None:
    assert warning in read_nccl_xml(text, "x").warnings


def test_phb_is_doubted_only_where_it_decides() -> None:
    assert read_nccl_xml(rail_machine(8), "x").warnings == ()
    phb = in_cpu('<pci busid="0000:01:00.0"><gpu/></pci><pci busid="0000:02:00.0"><gpu/></pci>')
    assert read_nccl_xml(phb, "x").warnings[-1].startswith("PHB may be NODE")


def test_remarks_are_bounded() -> None:
    warnings = read_nccl_xml(system("\n".join(["<x/>"] * 1000)), "x").warnings
    assert len(warnings) == 41
    assert warnings[-1] == "and 962 more remarks of these kinds"


# What is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.xml:1: no XML element found; give a topology file as NCCL writes it"),
        ("\n\nnoise", "f.xml:3: XML error in column 1: syntax error; mend the line"),
        (
            '<system version="1">\n<cpu numaid="0">\n<pci busid="0000:01:00.0">\n',
            "f.xml:4: not well-formed: the file ends inside <pci> of line 3; it was cut off, copy or dump it again",
        ),
        (
            '<system version="1">\n<cpu numaid="0">\n<pci busi',
            "f.xml:3: not well-formed: the file ends inside <cpu> of line 2; it was cut off, copy or dump it again",
        ),
        ('<graphs version="1"/>', "f.xml:1: root element is <graphs>, not <system>: an NCCL graph file"),
        (
            '<!DOCTYPE topology SYSTEM "x.dtd">\n<topology/>',
            "f.xml:1: root element is <topology>, not <system>: an hwloc f",
        ),
        (
            "<!-- hwloc -->\n<topology/>",
            "f.xml:2: root element is <topology>, not <system>: an hwloc file; give NCCL's",
        ),
        (
            '<pci busid="0000:01:00.0"/>',
            "f.xml:1: root element is <pci>, not <system>: a fragment of a topology; give t",
        ),
        (
            "<svg/>",
            "f.xml:1: root element is <svg>, not <system>: not NCCL's format; give a file that NCCL_TOPO_DUMP_FI",
        ),
        (
            '<!DOCTYPE a [<!ENTITY b "b">]><a>&b;</a>',
            "f.xml:1: DOCTYPE 'a' is refused, NCCL's files have none; take it out",
        ),
        (in_cpu("\n<pci/>"), "f.xml:2: <pci> without busid; NCCL needs one for every device"),
        (
            in_cpu('\n<pci busid="0000:01:00.0"/>\n<pci busid="ffff:ff:01.0"><pci busid="0000:01:00.0"/></pci>'),
            "f.xml:3: busid '0000:01:00.0' is in another place too, on line 2; a device has one place",
        ),
        ("<a>" * 40, "f.xml:1: <a> is nested more than 32 deep; no machine's PCI tree is"),
        (
            in_cpu('<pci busid="0000:01:00.0">' + "<gpu/>" * 130 + "</pci>"),
            "f.xml:1: 130 GPUs and 0 network ports; one machine has at most 128 and 512, give the file of one",
        ),
    ],
)
def test_refusals_are_one_line_with_place_rule_and_fix(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        read_nccl_xml(text, "f.xml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


BOMB = "<!DOCTYPE a [" + "".join(f'<!ENTITY e{n + 1} "{f"&e{n};" * 10}">' for n in range(12)) + "]><a>&e12;</a>"


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        b"\x00\xff\x17<" * 2_500_000,
        "noise " * 1_700_000,
        "<system version='1'>" + "<cpu/>" * 1_700_000,
        "<system version='1'>" + " " * 10_000_000,
        "<!--" * 2_500_000,
        "<a" * 5_000_000,
        "<system version='" + "1" * 10_000_000,
        "<system>" + "&lt;" * 2_500_000,
        "<system " + " ".join(f"a{n}=''" for n in range(1_000_000)) + ">",
    ],
    ids=["entities", "bytes", "words", "elements", "blanks", "comments", "tags", "value", "text", "attributes"],
)
def test_hostile_input_is_refused_in_no_time(text: str | bytes) -> None:
    start = time.process_time()
    with pytest.raises(TopologyError, match=r"\Af\.xml:1: [^\n]{1,200}\Z"):
        read_nccl_xml(text, "f.xml")
    assert time.process_time() - start < 2


def test_the_worst_that_is_accepted_is_still_fast() -> None:
    crowd = "".join(f'<pci busid="0000:{n >> 5:02x}:{n & 31:02x}.0"><nic><net/></nic></pci>' for n in range(512))
    gpus = "".join(f'<pci busid="0001:{n:02x}:00.0"><gpu dev="{n}"/></pci>' for n in range(128))
    start = time.process_time()
    topology = read_nccl_xml(system(f'<cpu numaid="0">{crowd}</cpu><cpu numaid="1">{gpus}</cpu>'), "x")
    assert (len(topology.gpus), len(topology.nics)) == (128, 512)
    assert time.process_time() - start < 5


# Small parts


@pytest.mark.parametrize(
    ("text", "busid"),
    [
        ("00000000:0F:00.0", "0000:0f:00.0"),
        (" 0000:0f:00.0\n", "0000:0f:00.0"),
        ("f:0.1", "0000:0f:00.1"),
        ("10001:00:00.0", "10001:00:00.0"),
        ("fffffff:ff:ff.0", "fffffff:ff:ff.0"),
        ("0002:81:00", "0002:81:00.0"),
        ("mlx5_0", None),
        ("0000:0f:00.0.1", None),
        ("\u0661:00.0", None),
        ("", None),
    ],
)
def test_bus_ids_have_one_spelling(text: str, busid: str | None) -> None:
    assert normalise_busid(text) == busid


def test_two_gpus_in_one_device_are_told() -> None:
    two = '<pci busid="0000:1a:00.0" class="0x030200"><gpu dev="0" sm="90"{0}/><gpu dev="1" sm="90"{0}/></pci>'
    topology = read_nccl_xml(in_cpu(two.format("")), "t.xml")
    assert len(topology.gpus) == 2
    assert any("2 <gpu> in one <pci>, 0000:1a:00.0" in warning for warning in topology.warnings)
    # A GPU that is divided lists its parts so.
    divided = read_nccl_xml(in_cpu(two.format(' mlopart="1"')), "t.xml")
    assert not any("2 <gpu> in one <pci>" in warning for warning in divided.warnings)


def test_devices_of_unknown_kind_are_something() -> None:
    devices = "".join(f'<pci busid="0000:{place:02x}:00.0" link_width="16"/>' for place in range(16, 48))
    disk = '<pci busid="0000:60:00.0" class="0x010802"/>'
    for inside, words in ((devices, "32 devices of unknown kind"), (disk, "1 device of other kinds")):
        topology = read_nccl_xml(system(f'<cpu numaid="0">{inside}</cpu><cpu numaid="1"></cpu>'), "t.xml")
        assert tree(topology) == [f"NUMA 0 \u00b7 {words}", "NUMA 1 \u00b7 nothing attached"]
