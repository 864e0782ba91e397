# SPDX-License-Identifier: Apache-2.0
"""Whatever a file holds, reading it ends soon: in a topology that every question can be asked of, or in one line."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.matrices import CUBE_MESH, LEGEND, all_pairs, matrix, wired
from topology.matrix import read_matrix
from topology.model import Topology, TopologyError
from topology.queries import links_per_gpu, nearest_nics, nvlink_kind, peer_bandwidth_gbps
from topology.text import as_json, as_text
from topology.xml_reader import read_nccl_xml

# For each of the six tests below; COMMOPT_FUZZ_EXAMPLES=4000 is a thorough run.
EXAMPLES = int(os.environ.get("COMMOPT_FUZZ_EXAMPLES", "60"))
fuzzed = settings(max_examples=EXAMPLES, deadline=None, database=None)

FIXTURES = Path(__file__).parent / "topologies"
AFFINITY = {"CPU Affinity": ["0-7,16-23"] * 8, "NUMA Affinity": ["0", "1"] * 4, "GPU NUMA ID": ["N/A"] * 8}
MATRICES = [
    matrix(8, wired(CUBE_MESH), affinity=AFFINITY),
    matrix(4, all_pairs("NV18"), ["NIC0", "NIC1"], affinity=AFFINITY) + "NIC Legend:\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n",
    *[file.read_text() for file in sorted(FIXTURES.glob("*.txt"))],
]
DOCUMENTS = [file.read_text() for file in sorted(FIXTURES.glob("*.xml"))]
MATRIX_WORDS = ["GPU0", "GPU1", "GPU2", "NIC0", "mlx5_0", "X", "NV1", "NV18", "PIX", "SYS", "NODE", "OK", "0-7", "N/A"]
MATRIX_WORDS += ["\t", "\n", " ", "#", "CPU Affinity", "NUMA Affinity", "NIC0: mlx5_0", "\x1b[4m", "[0m", "|", "9" * 9]
XML_WORDS = ['<system version="1">', "</system>", '<cpu numaid="0">', '<cpu numaid="-1" affinity="ff">', "</cpu>"]
XML_WORDS += ['<pci busid="0000:01:00.0" class="0x030200">', '<pci busid="x" link_width="16">', "</pci>", "</gpu>"]
XML_WORDS += ['<gpu dev="0" sm="90" rank="0">', '<nvlink target="0000:02:00.0" count="2" tclass="0x030200"/>', "<nic>"]
XML_WORDS += [
    '<net name="a" dev="0" speed="1e9" port="1"/>',
    "</nic>",
    "<!--",
    "-->",
    "<!DOCTYPE a [",
    "]>",
    "&a;",
    "\n",
]


def ask_everything(topology: Topology) -> None:
    places = range(len(topology.gpus))
    assert len(links_per_gpu(topology)) == len(topology.gpus)
    assert isinstance(nvlink_kind(topology), str)
    json.dumps(as_json(topology), allow_nan=False)
    assert as_text(topology)
    for place in places:
        nearest_nics(topology, place)
        if place:
            peer_bandwidth_gbps(topology, 0, place)
    assert all("\n" not in warning and len(warning) < 1000 for warning in topology.warnings)


def survives(read: Callable[[str, str], Topology], text: str) -> Topology | None:
    """The topology, asked everything, or None when it is refused in one line."""
    start = time.process_time()
    topology, message = None, "refused"
    try:
        topology = read(text, "f")
    except TopologyError as error:
        message = str(error)
    if topology is not None:
        ask_everything(topology)
    assert 0 < len(message) < 1000
    assert "\n" not in message
    assert time.process_time() - start < 5
    return topology


def damaged(texts: list[str], words: list[str]) -> st.SearchStrategy[str]:
    """One of `texts` with a stretch cut, repeated, or replaced by words of the format."""

    @st.composite
    def draw(pick) -> str:
        text: str = pick(st.sampled_from(texts))
        for _ in range(pick(st.integers(1, 4))):
            start = pick(st.integers(0, len(text)))
            end = pick(st.one_of(st.just(len(text)), st.integers(start, min(len(text), start + 80))))
            piece = pick(
                st.one_of(
                    st.just(""),
                    st.sampled_from(words),
                    st.text(max_size=6),
                    st.integers(-9, 10**20).map(str),
                    st.just(text[start:end] * 2),
                )
            )
            text = text[:start] + piece + text[end:]
        return text

    return draw()


def mixed(words: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.one_of(st.sampled_from(words), st.text(max_size=3)), max_size=60).map("".join)


@fuzzed
@given(damaged(MATRICES, MATRIX_WORDS))
def test_damaged_matrices(text: str) -> None:
    survives(read_matrix, text)


@fuzzed
@given(mixed(MATRIX_WORDS))
def test_words_of_a_matrix_in_any_order(text: str) -> None:
    survives(read_matrix, "\tGPU0\tGPU1\tNIC0\nGPU0\t" + text)


@fuzzed
@given(st.text())
def test_any_text_as_a_matrix(text: str) -> None:
    survives(read_matrix, text)


@fuzzed
@given(damaged(DOCUMENTS, XML_WORDS))
def test_damaged_documents(text: str) -> None:
    survives(read_nccl_xml, text)


@fuzzed
@given(mixed(XML_WORDS))
def test_words_of_a_document_in_any_order(text: str) -> None:
    survives(read_nccl_xml, '<system version="1">' + text)


@fuzzed
@given(st.binary())
def test_any_bytes_as_a_document(data: bytes) -> None:
    survives(lambda text, source: read_nccl_xml(data, source), "")


# Units of ten megabytes, after the text that a unit needs before it.
REPEATED = {
    "words": ("", "GPU0 GPU1 "),
    "headers": ("", "GPU0 GPU1\n"),
    "rows": ("GPU0 GPU1\n", "GPU0 X NV1\n"),
    "matrices": ("", "GPU0 GPU1\nGPU0 X NV1\nGPU1 NV1 X\n"),
    "long line": ("GPU0 GPU1\nGPU0 X", " NV1"),
    "blanks": ("GPU0 GPU1\nGPU0 X ", "\t"),
    "colours": ("GPU0", "["),
    "labels": ("", "GPU0GPU1"),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_ten_megabytes_are_answered_soon(kind: str) -> None:
    first, unit = REPEATED[kind]
    survives(read_matrix, first + unit * (10_000_000 // len(unit)) + LEGEND)


@pytest.mark.parametrize("read", [read_matrix, read_nccl_xml])
def test_ten_megabytes_of_noise_are_answered_soon(read: Callable[[str, str], Topology]) -> None:
    assert survives(read, random.Random(0).randbytes(10_000_000).decode("latin-1")) is None


def test_many_gpus_are_answered_soon() -> None:
    for links in (1, 4, 18):
        assert survives(read_matrix, matrix(64, all_pairs(f"NV{links}"))) is not None
