"""Which cloud provider's own settings a job runs with."""

from __future__ import annotations

import re
from collections.abc import Mapping

# In the order of asking: variable, its value, whose it is. Only what no other place sets: a tuner's name or a
# topology file alone may be anybody's.
_MARKS = (
    (r"NCCL_FASTRAK_\w+", r".*", "Google A3 Mega (FasTrak)"),
    (r"NCCL_GPUDIRECTTCPX_\w+", r".*", "Google A3 High (GPUDirect-TCPX)"),
    (r"NCCL_NET", r"fastrak", "Google A3 Mega (FasTrak)"),
    (r"NCCL_NET", r"gpudirecttcpx.*", "Google A3 High (GPUDirect-TCPX)"),
    (r"NCCL_NET", r"gib", "Google A3 Ultra, A4 (gIB)"),
    (r"NCCL_(?:TUNER_PLUGIN|TUNER_CONFIG_PATH|TOPO_FILE|SHIMNET_\w+)", r".*/gib/.*", "Google A3 Ultra, A4 (gIB)"),
    (r"NCCL_(?:TUNER_CONFIG_PATH|SHIMNET_\w+)", r".*/a3plus_\w+\.\w+", "Google A3 Mega (FasTrak)"),
    (r"NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE", r".*", "Google A3 or A4"),
    (r"NCCL_TUNER_PLUGIN", r"ofi|.*libnccl-(?:tuner-ofi|ofi-tuner)[\w.]*|.*ofi-nccl/.*", "AWS (OFI plugin)"),
    (r"NCCL_TOPO_FILE", r".*ofi-nccl/.*", "AWS (OFI plugin)"),
    (r"NCCL_TOPO_FILE", r"/opt/microsoft/.*", "Azure"),
    (r"NCCL_(?:TUNER_PLUGIN|TUNER_CONFIG_\w+|TOPO_FILE)", r"/opt/oci-hpc/.*|.*libnccl-ocituner\b.*", "Oracle"),
)


def provider_profile(environment: Mapping[str, str]) -> str | None:
    """Return whose settings these are ("Google A3 Mega (FasTrak)"); None when no provider's are recognised.

    What such a profile sets is tested by the provider for that machine, and some plugins refuse to start without it.
    """
    for variable, value, provider in _MARKS:
        if any(
            re.fullmatch(variable, name) and text and re.fullmatch(value, text.strip(), re.IGNORECASE)
            for name, text in environment.items()
        ):
            return provider
    return None
