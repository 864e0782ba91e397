"""A HookState as part of a checkpoint that all ranks write together (torch.distributed.checkpoint)."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import torch

from commopt.errors import ConfigurationError
from commopt.hooks.saving import FORMAT
from commopt.hooks.state import HookState


class Checkpointed:
    """Let every rank write and read its own residuals: `dcp.save({"model": ..., "comm": Checkpointed(comm)}, ...)`.

    dcp.load needs to know what to look for before anything is there. Each rank's part is therefore one value, under
    the rank's own name. To load into another world (other ranks, or other nodes), say how many ranks wrote the
    checkpoint: `saved_world_size`.
    """

    def __init__(self, state: HookState, saved_world_size: int | None = None) -> None:
        if saved_world_size is not None and (type(saved_world_size) is not int or saved_world_size < 1):
            raise ConfigurationError(
                f"Checkpointed(saved_world_size={saved_world_size!r}) must be the number of ranks that wrote the "
                f"checkpoint, 1 or more, or None for the ranks there are now"
            )
        self._state = state
        self._saved_world_size = saved_world_size

    def state_dict(self) -> dict[str, bytes]:
        """Return this rank's part under its own name; for another world, empty places for all ranks' parts."""
        team = self._state.membership.team
        if self._saved_world_size is not None:
            return {f"place {place}": b"" for place in range(self._saved_world_size)}
        buffer = BytesIO()
        torch.save(self._state.state_dict(), buffer)
        return {f"place {team.rank}": buffer.getvalue()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """See HookState.load_state_dict; collective."""
        self._state.load_from(lambda: _read(saved))
        self._saved_world_size = None  # from now on it is this world that saves


def _read(saved: Mapping[str, bytes]) -> dict[str, Any]:
    parts = [torch.load(BytesIO(saved[name]), map_location="cpu", weights_only=True) for name in sorted(saved)]
    return parts[0] if len(parts) == 1 else {"format": FORMAT, "ranks": parts}
