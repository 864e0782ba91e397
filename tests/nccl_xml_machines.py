"""NCCL topology XML of machines that do not exist: one to measure, and hypothesis strategies for all the others."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy


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


def _attributes(**choices: SearchStrategy[str]) -> SearchStrategy[str]:
    """Any of the attributes, each with one of its values."""
    some = st.fixed_dictionaries({}, optional=choices)
    return some.map(lambda values: "".join(f' {key.strip("_")}="{value}"' for key, value in values.items()))


_SMALL = st.integers(0, 99).map(str)
_LINK = {
    "link_speed": st.sampled_from(
        ["", "Unknown", "2.5 GT/s PCIe", "8 GT/s", "16.0 GT/s PCIe", "64.0 GT/s PCIe", "fast"]
    ),
    "link_width": st.sampled_from(["0", "4", "16", "32", "63", "255", "x"]),
}
_NET = _attributes(
    name=st.sampled_from(
        ["mlx5_0", "mlx5_1", "eth0", "veth7", "docker0", "br-a", "a &lt;b&gt; &quot;c&quot;", "ens1f0"]
    ),
    dev=_SMALL,
    speed=st.sampled_from(["-1", "0", "1000", "56000", "100000", "400000", "2500.5", "none"]),
    port=st.sampled_from(["0", "1", "2"]),
    guid=st.sampled_from(["0x0", "7", "0xfffffffffffffff1", "0xfffffffffffffffff1"]),
    gdr=st.sampled_from(["0", "1", "2", ""]),
)
_GPU = _attributes(dev=_SMALL, sm=st.sampled_from(["70", "90", "120"]), rank=_SMALL, gdr=st.sampled_from(["0", "1"]))
_CPU = _attributes(
    affinity=st.sampled_from(["", "0", "ff", "5555,55555555", "0,ffff0000,1", ",".join(["80000001"] * 40), "zz"]),
    affinity_offset=st.sampled_from(["0", "64", "4096", "-1"]),
    arch=st.sampled_from(["x86_64", "arm64", "ppc64"]),
    vendor=st.sampled_from(["GenuineIntel", "AuthenticAMD"]),
    host_hash=st.just("0xabc"),
    familyid=_SMALL,
    modelid=_SMALL,
)


@st.composite
def _nvlinks(draw: DrawFn) -> str:
    targets = st.sampled_from(["0000:01:00.0", "0000:02:00.0", "0000:ee:00.0", "fffffff:ff:ff.0", "fffffff:ffff:ff"])
    classes = st.sampled_from(["0x030200", "0x068000", "0x068001", "", "0x060400"])
    one = st.builds(
        lambda target, count, tclass: f'<nvlink target="{target}" count="{count}" tclass="{tclass}"/>',
        targets,
        st.integers(0, 18),
        classes,
    )
    return "".join(draw(st.lists(one, max_size=3)))


@st.composite
def machines(draw: DrawFn) -> str:
    """Well-formed XML of a machine: any attribute may be missing or useless, bus ids are unique."""
    free = iter(range(1, 200))
    dump = draw(st.booleans())  # a template has no <gpu> and no <net>

    def device(depth: int) -> str:
        content = ""
        kind = draw(st.sampled_from(["gpu", "nic", "other", "gpu", "nic", *(["switch"] * 4 if depth < 3 else [])]))
        attributes = draw(
            _attributes(
                class_=st.sampled_from(["0x030200", "0x020000", "0x020700", "0x060400", "0x068000", "0x010802", "?"]),
                vendor=st.sampled_from(["0x10de", "0x15b3", "0x1a03", "0xffff"]),
                device=st.sampled_from(["0x2330", "0x1", "0xffff"]),
                **_LINK,
            )
        )
        busid = f"0000:{next(free):02x}:00.0"
        if kind == "gpu" and dump:
            content = "".join(f"<gpu{draw(_GPU)}>{draw(_nvlinks())}</gpu>" for _ in range(draw(st.integers(1, 2))))
        if kind == "nic" and dump:
            content = f"<nic>{nets()}</nic>"
        if kind == "switch":
            content = "".join(device(depth + 1) for _ in range(draw(st.integers(1, 3))))
        return f'<pci busid="{busid}"{attributes}>{content}</pci>'

    def nets() -> str:
        return "".join(f"<net{draw(_NET)}/>" for _ in range(draw(st.integers(0, 3))))

    def child() -> str:
        return f"<nic>{nets()}</nic>" if dump and draw(st.integers(0, 5)) == 0 else device(0)

    cpus = [
        f"<cpu{numa}{draw(_CPU)}>{''.join(child() for _ in range(draw(st.integers(0, 4))))}</cpu>"
        for numa in draw(st.lists(st.sampled_from(["", ' numaid="0"', ' numaid="1"', ' numaid="8"']), unique=True))
    ]
    return f'<system version="1">{"".join(cpus)}</system>'
