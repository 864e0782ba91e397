"""Whose settings are these? Some clouds ship a set of variables that their plugin checks; it is theirs to change."""

from __future__ import annotations

from collections.abc import Mapping

# A variable (or the beginning of several), the values that do not count, and who sets it.
_SIGNS = (
    ("NCCL_FASTRAK_", (), "Google's GPUDirect-TCPXO"),
    ("NCCL_GPUDIRECTTCPX_", (), "Google's GPUDirect-TCPX"),
    ("NCCL_SHIMNET_", (), "Google's guest configuration checker"),
    ("NCCL_TUNER_CONFIG_", (), "a tuner plugin with its configuration file"),
    ("NCCL_TUNER_PLUGIN", ("none", ""), "a tuner plugin"),
)


def provider_profile(environment: Mapping[str, str]) -> str | None:
    """Name the provider's profile that set NCCL's variables; None where nothing speaks for one."""
    if environment.get("NCCL_NET", "").lower() == "gib":
        return "Google's gIB"
    for sign, void, owner in _SIGNS:
        if any(name.startswith(sign) and value.lower() not in void for name, value in environment.items()):
            return owner
    return None
