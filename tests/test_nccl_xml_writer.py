"""NCCL's XML as it is written: the same facts when read again, in a form that NCCL's small parser takes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.nccl_xml_machines import machines
from topology.model import Cpu, Gpu, Nic, NvLinks, PciDevice, PciLink, Topology, TopologyError
from topology.xml_reader import read_nccl_xml
from topology.xml_writer import write_nccl_xml

FIXTURES = Path(__file__).parent / "topologies"
XML_FILES = sorted(path.name for path in FIXTURES.glob("*.xml"))


def fixture(name: str) -> Topology:
    return read_nccl_xml((FIXTURES / name).read_bytes(), name)


def same_facts(topology: Topology) -> Topology:
    return replace(topology, source="", warnings=())


@pytest.mark.parametrize("name", XML_FILES)
def test_fixtures_survive_writing(name: str) -> None:
    topology = fixture(name)
    text = write_nccl_xml(topology)
    assert same_facts(read_nccl_xml(text, name)) == same_facts(topology)
    assert write_nccl_xml(read_nccl_xml(text, name)) == text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(machines())
def test_machines_survive_writing(text: str) -> None:
    topology = read_nccl_xml(text, "x")
    assert same_facts(read_nccl_xml(write_nccl_xml(topology), "x")) == same_facts(topology)


@pytest.mark.parametrize("name", XML_FILES)
def test_written_text_suits_nccls_small_parser(name: str) -> None:
    """No declaration, no tabs, one blank before each attribute, values of at most 255 characters, its five tags."""
    text = write_nccl_xml(fixture(name))
    line = re.compile(r' *</?(system|cpu|pci|gpu|nvlink|nic|net)( [a-z_]+="[^"<&\t\n]{0,255}"){0,16}/?>')
    assert all(line.fullmatch(written) for written in text.splitlines())
    assert text.startswith('<system version="1">\n')


def test_written_form() -> None:
    topology = Topology(
        "test",
        gpus=(Gpu(0, "0000:02:00.0", 1, sm=90, gdr=True, rank=0),),
        nics=(Nic("docker0", None, None, None, None, virtual=True), Nic("mlx5_0", "0000:03:00.0", 1, 1, 56.0, guid=18)),
        cpus=(Cpu(1, "x86_64", "GenuineIntel", (0, 33), 255, 6, 143),),
        pci=(
            PciDevice("0000:01:00.0", "switch", None, 0, 0x060400),
            PciDevice("0000:02:00.0", "gpu", "0000:01:00.0", 0, 0x030200, 0x10DE, 1, PciLink(2.5, 8), PciLink(32, 16)),
            PciDevice("0000:03:00.0", "nic", "0000:01:00.0", 0, 0x020700),
        ),
        nvlinks=(NvLinks(0, None, 18, kind="switch"), NvLinks(0, None, 2, "fffffff:ffff:ff")),
    )
    assert write_nccl_xml(topology).splitlines() == [
        '<system version="1">',
        '  <cpu host_hash="0xff" numaid="1" affinity="00000002,00000001" arch="x86_64" vendor="GenuineIntel" '
        'familyid="6" modelid="143">',
        "    <nic>",
        '      <net name="docker0"/>',
        "    </nic>",
        '    <pci busid="0000:01:00.0" class="0x060400">',
        '      <pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" device="0x0001" '
        'link_speed="32.0 GT/s PCIe" link_width="8">',
        '        <gpu dev="0" sm="90" rank="0" gdr="1">',
        '          <nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>',
        '          <nvlink target="fffffff:ffff:ff" count="2"/>',
        "        </gpu>",
        "      </pci>",
        '      <pci busid="0000:03:00.0" class="0x020700">',
        "        <nic>",
        '          <net name="mlx5_0" speed="56000" port="1" guid="0x12"/>',
        "        </nic>",
        "      </pci>",
        "    </pci>",
        "  </cpu>",
        "</system>",
    ]


def test_devices_of_an_unknown_cpu_are_written() -> None:
    lost = Topology("t", gpus=(Gpu(0, "0000:02:00.0", None, 80),), pci=(PciDevice("0000:02:00.0", "gpu", None, None),))
    assert '  <cpu numaid="-1">\n    <pci busid="0000:02:00.0">\n' in write_nccl_xml(lost)


def test_many_cpus_fit_into_a_value() -> None:
    text = write_nccl_xml(Topology("t", cpus=(Cpu(0, affinity=tuple(range(1000, 1100))),)))
    assert 'affinity_offset="992"' in text
    assert read_nccl_xml(text, "t").cpus[0].affinity == tuple(range(1000, 1100))


@pytest.mark.parametrize("busid", [None, "0000:07:00.0"])
def test_a_gpu_without_a_place_cannot_be_written(busid: str | None) -> None:
    with pytest.raises(
        TopologyError, match=r"\Anvidia-smi: GPU 3 \(bus id .*\) has no place in a PCI tree, which NCCL"
    ):
        write_nccl_xml(Topology("nvidia-smi", gpus=(Gpu(3, busid, None),)))
