"""NCCL's syntax for lists of interfaces and adapters: "mlx5_0:1,mlx5_2", "=eth0", "^docker,lo"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """What NCCL_SOCKET_IFNAME or NCCL_IB_HCA selects."""

    exclude: bool
    """With "^": everything but these."""
    exact: bool
    """With "=": whole names; otherwise prefixes."""
    items: tuple[tuple[str, int | None], ...]
    """Name and port; None stands for every port."""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a variable's value; empty items are left out, as NCCL does."""
        exclude = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        items = []
        for item in text.removeprefix("=").split(","):
            name, _, port = item.strip().partition(":")
            if name:
                items.append((name, int(port) if port.isdecimal() else None))
        return cls(exclude, exact, tuple(items))

    def selects(self, name: str, port: int | None = None) -> bool:
        """Whether NCCL would use this device (and port)."""
        listed = any(self._matches(item, name, port) for item in self.items)
        return listed != self.exclude if self.items else True

    def unmatched(self, names: list[str]) -> list[str]:
        """Items that fit none of `names`."""
        return [item[0] for item in self.items if not any(self._matches(item, name, item[1]) for name in names)]

    def stretched(self, names: list[str]) -> list[str]:
        """Return the names that are selected only because an item that is another's whole name is their beginning."""
        whole = [item for item, _ in self.items if item in names and not self.exact and not self.exclude]
        wanted = [item for item, _ in self.items]
        return [name for name in names if name not in wanted and any(name.startswith(item) for item in whole)]

    def _matches(self, item: tuple[str, int | None], name: str, port: int | None) -> bool:
        wanted, wanted_port = item
        same = name == wanted if self.exact else name.startswith(wanted)
        return same and (wanted_port is None or port is None or wanted_port == port)
