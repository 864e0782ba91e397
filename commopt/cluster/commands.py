# SPDX-License-Identifier: Apache-2.0
"""The commands that make an emulated cluster, and what a machine lacks where they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

_COMMAND_TIMEOUT_S = 30

# Word in a failed command -> the missing requirement.
_REQUIREMENTS = {
    "tbf": "a kernel with token bucket filters (CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`) or --rate none",
    "veth": "a kernel with veth pairs (CONFIG_VETH; try `modprobe veth`)",
    "bridge": "a kernel with bridges (CONFIG_BRIDGE; try `modprobe bridge`)",
    "cubic": "a kernel with TCP's usual congestion control (CONFIG_TCP_CONG_CUBIC; try `modprobe tcp_cubic`)",
}
_PRIVILEGES = (
    "the right to make network namespaces (CONFIG_NET_NS, CAP_SYS_ADMIN and CAP_NET_ADMIN; "
    "in a container: `docker run --privileged`)"
)


class ClusterUnavailableError(RuntimeError):
    """This machine cannot emulate a cluster. The message names the missing requirement and how to get it."""


def check_tools() -> None:
    """Raise ClusterUnavailableError unless this is root on Linux with iproute2."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        raise ClusterUnavailableError(
            f"no {' and no '.join(absent)} on PATH; an emulated cluster needs Linux with iproute2 "
            "(`apt-get install iproute2`, `dnf install iproute iproute-tc`)"
        )
    if os.geteuid() != 0:
        raise ClusterUnavailableError(
            f"user id {os.geteuid()} may not make network namespaces; an emulated cluster needs root "
            '(`sudo env "PATH=$PATH" commopt cluster ...`)'
        )


def ip(*arguments: str) -> str:
    return run(["ip", *arguments])


def tc(*arguments: str) -> str:
    return run(["tc", *arguments])


def run(command: Sequence[str]) -> str:
    # In a session of its own: Ctrl-C at the terminal cannot interrupt a command halfway.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        requirement = next((lack for word, lack in _REQUIREMENTS.items() if word in command), _PRIVILEGES)
        raise ClusterUnavailableError(
            f"`{' '.join(command)}` failed: {done.stderr.strip().rstrip('.')}. An emulated cluster needs {requirement}"
        )
    return done.stdout
