# SPDX-License-Identifier: Apache-2.0
"""Listen to every collective of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from commopt.groups import Team

PRIMITIVES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all")


@contextmanager
def overheard(listen: Callable[[Team, str, int, list[int]], None]) -> Iterator[None]:
    """Tell `listen` of each: its team, its name, the bytes of what it reads (its last tensor), and its root, if any."""
    with ExitStack() as stack:
        for method in (*PRIMITIVES, "start_all_reduce"):
            primitive, original = method.removeprefix("start_"), getattr(Team, method)

            def spy(team: Team, *arguments: Any, _what: str = primitive, _do: Any = original, **named: Any) -> Any:
                tensors = [each for each in arguments if isinstance(each, Tensor)]
                roots = [each for each in arguments if not isinstance(each, Tensor)]
                roots += [value for name, value in named.items() if name in ("src", "dst")]
                listen(team, _what, tensors[-1].nbytes, roots)
                return _do(team, *arguments, **named)

            stack.enter_context(patch.object(Team, method, spy))
        yield
