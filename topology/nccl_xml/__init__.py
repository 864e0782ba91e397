"""NCCL's topology XML, both ways: what NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads."""

from topology.nccl_xml.reader import read_nccl_xml
from topology.nccl_xml.writer import write_nccl_xml

__all__ = ["read_nccl_xml", "write_nccl_xml"]
