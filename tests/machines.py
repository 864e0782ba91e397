# SPDX-License-Identifier: Apache-2.0
"""Synthetic machines below a folder: the files of /sys and /proc that discovery and the doctor read.

    tree = Tree(tmp_path)
    tree.numa(0, "0-31")
    switch = tree.switch("0000:17:00.0", "pci0000:16", numa=0)
    tree.gpu("0000:19:00.0", switch, numa=0)
    tree.rdma("mlx5_0", "0000:1a:00.0", switch, numa=0, rate="400 Gb/sec (4X NDR)")
    tree.write("proc/cmdline", "iommu=pt")

Folders and links are as the kernel makes them: sys/bus and sys/class are links into sys/devices. `under` is a host
bridge ("pci0000:16"), a switch of `switch()`, or any other PCI device. Devices below a bridge or a switch get a port
of their own in between, as in hardware (`port=False`: none, as in a virtual machine).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NVIDIA = 0x10DE
MELLANOX = 0x15B3
SPEEDS = {gts: f"{gts} GT/s PCIe" for gts in (2.5, 5.0, 8.0, 16.0, 32.0)}


class Tree:
    """A fixture tree that grows with every call."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._places: dict[str, Path] = {}
        self._switches: set[str] = set()
        self._ports: dict[str, int] = {}

    def write(self, path: str, text: object) -> Path:
        """Write one file (relative to the root) as the kernel would, with a line break at the end."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def remove(self, path: str) -> None:
        """Remove one file (relative to the root)."""
        (self.root / path).unlink()

    def numa(self, node: int, cpulist: str) -> None:
        """A NUMA node with its CPUs, as in "0-15,32-47"."""
        self.write(f"sys/devices/system/node/node{node}/cpulist", cpulist)

    def cpuinfo(self, vendor: str = "GenuineIntel", family: int = 6, model: int = 143) -> None:
        """The first processor of an x86 /proc/cpuinfo."""
        self.write(
            "proc/cpuinfo", f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        )

    def pci(
        self,
        busid: str,
        under: str,
        *,
        pci_class: int,
        vendor: int = 0x1000,
        device: int = 0xC030,
        numa: int = -1,
        gts: float | None = 32.0,
        width: int = 16,
        max_gts: float | None = None,
        max_width: int | None = None,
        port: bool = True,
    ) -> str:
        """Any PCI device. `gts` and `width` are its link now, `max_*` what it can (as now, when left out).

        With gts=None there is nothing about a link, as for virtio devices.
        """
        if port and (under.startswith("pci") or under in self._switches):
            under = self._port(under, numa)
        above = Path("sys/devices") / under if under.startswith("pci") else self._places[under]
        place = above / busid
        self._places[busid] = place
        files: dict[str, object] = {
            "class": f"0x{pci_class:06x}",
            "vendor": f"0x{vendor:04x}",
            "device": f"0x{device:04x}",
            "numa_node": numa,
        }
        if gts is not None:
            files |= {"current_link_speed": SPEEDS[gts], "max_link_speed": SPEEDS[max_gts or gts]}
            files |= {"current_link_width": width, "max_link_width": max_width or width}
        for name, value in files.items():
            self.write(f"{place}/{name}", value)
        self._link(Path("sys/bus/pci/devices") / busid, place)
        return busid

    def _port(self, above: str, numa: int) -> str:
        """The next root port of a host bridge, or downstream port of a switch."""
        self._ports[above] = number = self._ports.get(above, 0) + 1
        domain, bus = above.removeprefix("pci").split(":")[:2]
        own_bus = int(bus, 16) + (0 if above.startswith("pci") else 1)
        return self.pci(f"{domain}:{own_bus:02x}:{number:02x}.0", above, pci_class=0x060400, numa=numa, port=False)

    def _link(self, link: Path, target: Path) -> None:
        where = self.root / link
        where.parent.mkdir(parents=True, exist_ok=True)
        where.symlink_to(os.path.relpath(target, link.parent))

    def switch(self, busid: str, under: str, *, numa: int = -1, gts: float = 32.0, width: int = 16) -> str:
        """A PCIe switch: `busid` is its upstream port; what is put under it gets downstream ports on the next bus."""
        self.pci(busid, under, pci_class=0x060400, numa=numa, gts=gts, width=width)
        self._switches.add(busid)
        return busid

    def gpu(self, busid: str, under: str, *, model: str | None = "NVIDIA H100 80GB HBM3", **pci: Any) -> str:
        """An NVIDIA GPU; `model=None` leaves out the driver's /proc/driver/nvidia. `pci`: what pci() takes."""
        self.pci(busid, under, **{"pci_class": 0x030200, "vendor": NVIDIA, "device": 0x2330} | pci)
        if model is not None:
            uuid = f"GPU-{int(busid.replace(':', '').replace('.', ''), 16):08x}-0000-0000-0000-000000000000"
            self.write(f"proc/driver/nvidia/gpus/{busid}/information", f"Model: \t\t {model}\nGPU UUID: \t {uuid}")
        return busid

    def nvswitch(self, busid: str, under: str, *, numa: int = -1) -> str:
        """An NVSwitch, as the PCIe device that it is too."""
        return self.pci(busid, under, pci_class=0x068000, vendor=NVIDIA, device=0x22A3, numa=numa, width=2)

    def ethernet(
        self,
        name: str,
        busid: str | None = None,
        under: str = "",
        *,
        mbps: int = 100_000,
        mtu: int = 1500,
        operstate: str = "up",
        virtio: bool = False,
        **pci: Any,
    ) -> str:
        """A network interface. No `busid`: without hardware (lo, docker0); no `under`: on a card made before."""
        if under and busid is not None:
            card = {"pci_class": 0x020000, "vendor": MELLANOX, "device": 0x1021, "gts": 16.0}
            self.pci(busid, under, **card | pci)
        above = Path("sys/devices/virtual") if busid is None else self._places[busid] / ("virtio0" if virtio else "")
        place = above / "net" / name
        for file, value in {
            "speed": mbps,
            "mtu": mtu,
            "operstate": operstate,
            "type": 772 if name == "lo" else 1,
        }.items():
            self.write(f"{place}/{file}", value)
        if busid is not None:
            self._link(place / "device", above)
        self._link(Path("sys/class/net") / name, place)
        return name

    def rdma(
        self,
        name: str,
        busid: str,
        under: str = "",
        *,
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        phys_state: str = "5: LinkUp",
        link_layer: str = "InfiniBand",
        ports: int = 1,
        **pci: Any,
    ) -> str:
        """An RDMA device with equal ports; no `under`: on a card made before. RoCE: link_layer="Ethernet"."""
        if under:
            card = {"pci_class": 0x020700 if link_layer == "InfiniBand" else 0x020000, "vendor": MELLANOX}
            self.pci(busid, under, **card | {"device": 0x1021} | pci)
        place = self._places[busid] / "infiniband" / name
        guid = f"b8ce:f603:0000:{int(busid.split(':')[1], 16):04x}"
        self.write(f"{place}/node_guid", guid)
        self.write(f"{place}/sys_image_guid", guid)
        values = {"state": state, "phys_state": phys_state, "rate": rate, "link_layer": link_layer}
        for number in range(1, ports + 1):
            for file, value in values.items():
                self.write(f"{place}/ports/{number}/{file}", value)
        self._link(place / "device", self._places[busid])
        self._link(Path("sys/class/infiniband") / name, place)
        return name


def server(root: Path, gpus: int = 8, rdma: bool = True, nvswitch: bool = True) -> Tree:
    """A two-socket server, healthy: a switch for two GPUs and two 400 Gb/s HCAs, eth0 (25 Gb/s) on socket 0, lo.

    GPU bus ids are 0000:19:00.0, 0000:1a:00.0, 0000:39:00.0, ... ; HCAs mlx5_0, ... on 0000:1b:00.0, 0000:1c:00.0, ...
    """
    tree = Tree(root)
    tree.cpuinfo()
    for numa in range(2):
        tree.numa(numa, f"{numa * 32}-{numa * 32 + 31},{64 + numa * 32}-{64 + numa * 32 + 31}")
    for group in range((gpus + 1) // 2):
        numa = 0 if group < (gpus + 3) // 4 else 1
        bus = 0x16 + 0x20 * group
        switch = tree.switch(f"0000:{bus + 1:02x}:00.0", f"pci0000:{bus:02x}", numa=numa)
        for member in range(min(2, gpus - 2 * group)):
            tree.gpu(f"0000:{bus + 3 + member:02x}:00.0", switch, numa=numa)
        for member in range(2 if rdma else 0):
            tree.rdma(f"mlx5_{2 * group + member}", f"0000:{bus + 5 + member:02x}:00.0", switch, numa=numa)
    if nvswitch:
        for number in range(4):
            tree.nvswitch(f"0000:{0xF1 + number:02x}:00.0", "pci0000:f0", numa=1)
    tree.ethernet("eth0", "0000:01:00.0", "pci0000:00", numa=0, mbps=25_000, gts=8.0, width=8)
    tree.ethernet("lo")
    return tree


def plain(root: Path) -> Tree:
    """A small virtual machine without a GPU: one virtio interface that states no speed, no NUMA on its devices."""
    tree = Tree(root)
    tree.cpuinfo("AuthenticAMD", 25, 1)
    tree.numa(0, "0-3")
    virtio: dict[str, Any] = {"pci_class": 0x020000, "vendor": 0x1AF4, "device": 0x1000, "gts": None}
    tree.pci("0000:00:03.0", "pci0000:00", port=False, **virtio)
    tree.ethernet("eth0", "0000:00:03.0", mbps=-1, virtio=True)
    tree.ethernet("lo")
    tree.ethernet("docker0", mbps=-1, operstate="down")
    return tree


def rail_machine(gpus: int, nics_per_gpu: int = 1) -> str:
    """A dump as of a big server: NVSwitches, two levels of PCIe switches, one switch per GPU with its NICs."""
    lines = ['<system version="1">']
    for gpu in range(gpus):
        if gpu % (gpus // 2 or 1) == 0:
            lines += ["</cpu>"] if gpu else []
            numa = gpu // (gpus // 2 or 1)
            lines.append(f'<cpu numaid="{numa}" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6">')
        link = 'link_speed="32.0 GT/s PCIe" link_width="16"'
        lines.append(f'<pci busid="00{gpu:02x}:01:00.0" class="0x060400" vendor="0x1000" {link}>')
        lines.append(f'<pci busid="00{gpu:02x}:02:00.0" class="0x060400" vendor="0x1000" {link}>')
        lines.append(f'<pci busid="00{gpu:02x}:03:00.0" class="0x030200" vendor="0x10de" {link}>')
        lines.append(f'<gpu dev="{gpu}" sm="90" rank="{gpu}" gdr="1">')
        lines += [f'<nvlink target="0000:f{switch}:00.0" count="3" tclass="0x068000"/>' for switch in range(6)]
        lines.append("</gpu></pci>")
        for nic in range(nics_per_gpu):
            number = gpu * nics_per_gpu + nic
            lines.append(f'<pci busid="00{gpu:02x}:04:{nic:02x}.0" class="0x020700" vendor="0x15b3" {link}><nic>')
            lines.append(
                f'<net name="mlx5_{number}" dev="{number}" speed="400000" port="1" guid="0x{number:x}" gdr="1"/>'
            )
            lines.append("</nic></pci>")
        lines.append("</pci></pci>")
    return "\n".join([*lines, "</cpu>", "</system>"])
