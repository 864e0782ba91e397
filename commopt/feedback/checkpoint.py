# SPDX-License-Identifier: Apache-2.0
"""Residuals and factors as plain dictionaries: for torch.save, rank-0-only checkpoints, other worlds and buckets.

A file may contain anything, for files get mixed up and damaged. All of it is checked as it is read: a value that is not
finite would make every later step so, and one of a wrong length would fail in the lane. It is read into host memory,
wherever it was loaded to: memory that another stream made could be given away while the lane still reads it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NoReturn, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.feedback.counts import StepCounts
from commopt.feedback.factors import RightFactor
from commopt.feedback.layout import Layout, Piece
from commopt.feedback.residual import EXP_AVG_SQ, Residual, ResidualKind, is_average
from commopt.feedback.store import ResidualStore
from commopt.version import __version__

T = TypeVar("T")
_Pieces = list[list[Any]]  # [name, begin, end, shape] each

MAX_MAGNITUDE = 1e30
"""Of a residual: float32 holds 3.4e38, but ranks add up, loss scales multiply and matrices are multiplied."""

_DTYPES = (torch.float32, torch.bfloat16)
_MAX_COLUMN_NORM = 1.01  # columns of factors are orthogonal and of norm 1, to rounding


def save(store: ResidualStore) -> dict[str, Any]:
    """Return copies in host memory: residuals by level and kind, then by name and element range, and all factors."""
    saved = collect(store, _on_host)
    settle(saved)
    return saved


def collect(store: ResidualStore, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return what `save` does, all tensors as `copy` makes them, which may have their values later than now.

    `settle` must finish it then.
    """
    residuals: dict[str, dict[str, Tensor]] = {}
    layouts: dict[str, list[_Pieces]] = {}
    with store.lock:
        for residual in store.residuals():
            role = f"{residual.path}/{residual.kind}"
            layout = residual.layout
            layouts.setdefault(role, []).append(pieces_of(layout))
            by_range = residuals.setdefault(role, {})
            for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
                values = residual.values[offset : offset + piece.numel].detach()
                # Pieces of waiting residuals may lie on top of each other; they add up.
                by_range[str(piece)] = by_range[str(piece)] + values if str(piece) in by_range else values
        divisions = {
            path: [[pieces_of(layout), division] for layout, division in known.items()]
            for path, known in store.divisions.items()
        }
        masks = [(path, pieces_of(layout), mask.state(copy)) for (path, layout), mask in store.untouched.items()]
        # Those of buffers that were not sent since it was loaded.
        for (path, layout), touched in store.touched_before.items():
            masks.append((path, pieces_of(layout), {"elements": copy((~touched).nonzero().view(-1))}))
        copied = {role: {key: copy(each) for key, each in by_range.items()} for role, by_range in residuals.items()}
        untouched = [list(each) for each in masks]  # those without elements, too: nothing is asked anew
        kept = {"residuals": copied, "layouts": layouts, "placed": divisions, "untouched": untouched}
        return {**kept, **_collect_shared(store, copy)}


def settle(saved: dict[str, Any]) -> None:
    """Make numbers of the copies of numbers in what `collect` returned, once they have their values."""
    saved["dropped"] = int(saved["dropped"])
    if saved["expected_square"] is not None:
        saved["expected_square"] = float(saved["expected_square"])
    for _, pieces, state in saved.get("untouched", ()):
        elements, active = state.pop("elements").long(), state.pop("active", None)
        flags = torch.zeros(sum(end - begin for _, begin, end, _ in pieces), dtype=torch.bool, device="cpu")
        flags[elements if active is None else elements[active]] = True
        state["bits"] = torch.from_numpy(np.packbits(flags.numpy() if flags.any() else flags[:0].numpy()))


def save_shared(store: ResidualStore) -> dict[str, Any]:
    """Return copies of what ranks have in common: factors and counts."""
    saved = _collect_shared(store, _on_host)
    settle(saved)
    return saved


def _collect_shared(store: ResidualStore, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    with store.lock:
        factors = [_entry_of(path, factor, copy) for path, factor in store.factors.everything()]
    dropped, expected = store.transaction.dropped, store.expected_square
    return {
        "factors": factors,
        "dropped": copy(dropped) if isinstance(dropped, Tensor) else dropped,
        "expected_square": None if expected is None else copy(expected),
        "adam_steps": store.counts.state(),
    }


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def restore(
    store: ResidualStore, saved: Mapping[str, Any], numels: Mapping[str, int], largest: Callable[[str], float]
) -> None:
    """Put a rank's residuals and factors where they were: nothing is rounded, added or moved.

    numels: of the parameters. largest: the magnitude that a residual of a parameter may have.
    Raises ConfigurationError, naming what is wrong, for anything that `save` would not return; `store` is then of no
    use. So does `spread`.
    """
    for path, kind, layouts, values in _residuals(saved, numels, largest):
        taken: set[str] = set()
        for layout in layouts:
            fresh = [piece for piece in layout.pieces if str(piece) not in taken]
            taken |= {str(piece) for piece in fresh}
            if fresh:
                joined = torch.cat([values[str(piece)] for piece in fresh])
                store.put(Residual(path, kind, Layout(tuple(fresh)), joined))
    for path, known in field(saved, "placed", dict).items():
        where = f"placed[{path!r}]"
        for entry in required(known, list, where):
            pieces, division = required_length(entry, 2, where)
            layout = layout_of(pieces, numels, where)
            store.divides_anew(required(path, str, where), layout, required(division, str, where))
    for path, factor in _factors(saved, numels):
        store.factors.add(path, factor)
    for path, layout, touched in _touched(saved, numels):
        store.touched_before[path, layout] = touched
    _restore_counts(store, [saved])


def spread(
    store: ResidualStore,
    ranks: Sequence[Mapping[str, Any]],
    numels: Mapping[str, int],
    largest: Callable[[str], float],
    world_size: int,
) -> None:
    """Give this rank of a new world its part of all old ranks' residuals: the sum over all ranks stays what it was.

    Of averages every rank gets the mean over the ranks that had them.
    """
    sums: dict[str, dict[str, Tensor]] = {}
    holders: dict[tuple[str, str], Tensor] = {}
    for saved in ranks:
        for path, _, layouts, values in _residuals(saved, numels, largest):
            for piece in {str(piece): piece for layout in layouts for piece in layout.pieces}.values():
                zero = torch.zeros(numels[piece.name], dtype=torch.float64, device="cpu")
                sums.setdefault(path, {}).setdefault(piece.name, zero)[piece.begin : piece.end] += values[str(piece)]
                if is_average(path):
                    counts = holders.setdefault((path, piece.name), torch.zeros_like(zero))
                    counts[piece.begin : piece.end] += 1
    for path, by_name in sums.items():
        for name, total in by_name.items():
            layout = Layout.of_parameters([(name, total.numel())])
            share = holders[path, name].clamp(min=1) if is_average(path) else world_size
            store.add(path, layout, (total / share).float())
    restore_shared(store, ranks, numels)


def restore_shared(store: ResidualStore, ranks: Sequence[Mapping[str, Any]], numels: Mapping[str, int]) -> None:
    """Put back what `save_shared` returned on some ranks of another world; several of them have the same factors."""
    factors: dict[tuple[str, Piece], RightFactor] = {}
    for saved in ranks:
        factors |= {(path, factor.piece): factor for path, factor in _factors(saved, numels)}
    for (path, _), factor in factors.items():
        store.factors.add(path, factor)
    _restore_counts(store, ranks)


def _restore_counts(store: ResidualStore, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Restore the number of dropped commits, the steps of Adam, and the expected square of a gradient."""
    store.transaction.dropped = max(whole(saved.get("dropped", 0), "dropped") for saved in ranks)
    counts = _steps_of(ranks)
    store.counts = StepCounts(counts or {}, by_parameter=counts is not None)
    expected = ranks[0].get("expected_square")
    if expected is not None:
        if not isinstance(expected, float) or not 0 <= expected <= MAX_MAGNITUDE**2:
            refuse("expected_square", expected, f"a float from 0 to {MAX_MAGNITUDE**2:g}, or None")
        store.expected_square = torch.tensor([expected], dtype=torch.float64, device="cpu")
    store.warm = True


def _touched(saved: Mapping[str, Any], numels: Mapping[str, int]) -> Iterator[tuple[str, Layout, Tensor]]:
    """Yield which elements were touched, by path and region; earlier versions did not save it.

    Ranks do not rely on it alike: they exchange it before they use it.
    """
    for entry in required(saved.get("untouched", []), list, "untouched"):
        path, pieces, state = required_length(entry, 3, "untouched")
        layout = layout_of(pieces, numels, "untouched")
        bits = field(required(state, dict, "a state in untouched"), "bits", Tensor, "untouched")
        nbytes = -(-layout.numel // 8)
        if bits.dtype != torch.uint8 or bits.shape not in ((0,), (nbytes,)):
            refuse("bits of untouched", bits, f"uint8 [{nbytes}], a bit for each of {layout.numel} elements, or [0]")
        packed = bits.new_zeros(nbytes, device="cpu") if not len(bits) else bits.to("cpu", copy=True)
        flags = torch.from_numpy(np.unpackbits(packed.numpy(), count=layout.numel)).bool()
        yield required(path, str, "untouched"), layout, ~flags


def _steps_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Return how many steps Adam has made of each parameter, None where a checkpoint does not say."""
    counts: dict[str, int] = {}
    for saved in ranks:
        if saved.get("adam_steps") is None:
            return None
        for name, count in field(saved, "adam_steps", dict).items():
            counts[name] = max(whole(count, f"adam_steps[{name!r}]"), counts.get(name, 0))
    return counts


def pieces_of(layout: Layout) -> _Pieces:
    """Return a layout as plain lists."""
    return [[piece.name, piece.begin, piece.end, list(piece.shape)] for piece in layout.pieces]


def layout_of(pieces: object, numels: Mapping[str, int], where: str) -> Layout:
    """Return the layout of plain lists made by `pieces_of`. Raises ConfigurationError if it does not fit `numels`."""
    found = []
    for entry in required(pieces, list, where):
        name, begin, end, shape = required_length(entry, 4, where)
        piece = _piece(name, begin, end, numels, where)
        dimensions = tuple(whole(dimension, where) for dimension in required(shape, list, where))
        if dimensions and prod(dimensions) != numels[name]:
            refuse(f"the shape of {name} in {where}", shape, f"one of its {numels[name]} elements")
        found.append(Piece(piece.name, piece.begin, piece.end, dimensions))
    return Layout(tuple(found))


# ------------------------------------------------------------------------------------------- reading


def _residuals(
    saved: Mapping[str, Any], numels: Mapping[str, int], largest: Callable[[str], float]
) -> Iterator[tuple[str, ResidualKind, list[Layout], dict[str, Tensor]]]:
    """Iterate over the levels and kinds of a rank's residuals, each with its layouts and the values of their pieces.

    The latter by name and range: the same piece may be in several layouts, and there with a shape or without.
    """
    residuals, layouts = field(saved, "residuals", dict), field(saved, "layouts", dict)
    if residuals.keys() != layouts.keys():
        refuse("residuals' keys", list(residuals), f"those of layouts, {reprlib.repr(list(layouts))}")
    for role, by_range in residuals.items():
        where = f"residuals[{role!r}]"
        path, kind = _role(role)
        known = [layout_of(pieces, numels, f"layouts[{role!r}]") for pieces in required(layouts[role], list, where)]
        pieces = {str(piece): piece for layout in known for piece in layout.pieces}
        if required(by_range, dict, where).keys() != pieces.keys():
            refuse(f"{where}'s keys", list(by_range), f"the ranges of its layouts, {reprlib.repr(list(pieces))}")
        values = {
            key: _values(by_range[key], piece, path, largest, f"{where}[{key!r}]") for key, piece in pieces.items()
        }
        yield path, kind, known, values


def _values(values: object, piece: Piece, path: str, largest: Callable[[str], float], where: str) -> Tensor:
    """Return a residual in host memory."""
    if not _is_plain(values) or values.dtype not in _DTYPES or values.shape != (piece.numel,):
        refuse(where, values, f"a float32 or bfloat16 tensor of shape [{piece.numel}]")
    here = values.detach().to("cpu")
    if piece.numel:
        limit = MAX_MAGNITUDE if is_average(path) else largest(piece.name)  # averages are added to no gradient
        least, most = (float(end) for end in torch.aminmax(here))
        if not (-limit <= least and most <= limit):  # so that NaN, which is neither, is found too
            place = int((~(here.abs() <= limit)).nonzero()[0])
            refuse(f"element {place} of {where}", float(here[place]), f"finite and of magnitude {limit:.5g} or less")
        if least < 0 and path.endswith(EXP_AVG_SQ):
            refuse(f"an element of {where}", least, "0 or above, as an average of squares is")
    return here


def _factors(saved: Mapping[str, Any], numels: Mapping[str, int]) -> Iterator[tuple[str, RightFactor]]:
    for number, entry in enumerate(field(saved, "factors", list)):
        where = f"factors[{number}]"
        required(entry, dict, where)
        path = field(entry, "path", str, where)
        name, begin, end = required_length(field(entry, "piece", list, where), 3, where)
        piece = _piece(name, begin, end, numels, where)
        right = _factor(field(entry, "right", Tensor, where), f"{where}['right']")
        if piece.numel % len(right):  # of another number of factors than here it may be: then it is not used
            refuse(f"{where}['right']", right, f"of as many rows as the {piece.numel} elements of {piece} have columns")
        yield path, RightFactor(piece, right)


def _factor(values: object, where: str) -> Tensor:
    if not _is_plain(values) or values.dtype != torch.float32 or values.dim() != 2 or not values.numel():
        refuse(where, values, "a float32 matrix [rows or columns, r]")
    here = values.detach().to("cpu", copy=True)
    largest = float(torch.linalg.vector_norm(here, dim=0).max())
    if not largest <= _MAX_COLUMN_NORM:
        refuse(f"the largest norm of a column of {where}", largest, "finite and not above 1: columns are orthonormal")
    return here


def _entry_of(path: str, factor: RightFactor, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        "path": path,
        "piece": [factor.piece.name, factor.piece.begin, factor.piece.end],
        "right": copy(factor.right),
    }


def _piece(name: object, begin: object, end: object, numels: Mapping[str, int], where: str) -> Piece:
    if not isinstance(name, str) or name not in numels:
        refuse(f"a name in {where}", name, "one of its parameters")
    piece = Piece(name, whole(begin, where), whole(end, where))
    if not piece.begin <= piece.end <= numels[name]:
        refuse(f"the range of {name} in {where}", [begin, end], f"within its {numels[name]} elements")
    return piece


def _is_plain(values: object) -> TypeGuard[Tensor]:
    return isinstance(values, Tensor) and values.layout == torch.strided and values.device.type != "meta"


def _role(role: object) -> tuple[str, ResidualKind]:
    path, _, kind = role.rpartition("/") if isinstance(role, str) else ("", "", "")
    if kind == "worker":
        return path, "worker"
    if kind in ("server", "owner"):  # the first name of it
        return path, "server"
    return refuse("a key of residuals", role, "a level and a kind, 'worker' or 'server', with a slash between")


# ------------------------------------------------------------------------------------------- errors


def field(entry: Mapping[str, Any], key: str, kind: type[T], where: str = "") -> T:
    """Return what an entry of a checkpoint has under `key`, which must be a `kind`; else raise ConfigurationError."""
    name = f"{where}[{key!r}]" if where else key
    if key not in entry:
        raise ConfigurationError(f"the checkpoint has no {name}: it is not what state_dict() returned; {_FIX}")
    return required(entry[key], kind, name)


def require_format(number: object, newest: int) -> None:
    """Raise ConfigurationError unless a checkpoint is of a format from 1 to `newest`, which this version writes."""
    if isinstance(number, int) and number > newest:
        raise ConfigurationError(
            f"the checkpoint is of format {number}, which a newer commopt has written, and {__version__} reads formats "
            f"up to {newest}; install that one, or load another checkpoint"
        )
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        refuse("format", number, f"a whole number from 1 to {newest}")


def required(value: object, kind: type[T], where: str) -> T:
    """Return `value`, of the checkpoint's `where`, which must be a `kind`; else raise ConfigurationError."""
    if not isinstance(value, kind):
        refuse(where, value, f"a {kind.__name__}")
    return value


def required_length(value: object, length: int, where: str) -> list[Any]:
    """Return `value`, which must be a list of so many entries; else raise ConfigurationError."""
    if not isinstance(value, list) or len(value) != length:
        refuse(f"an entry of {where}", value, f"a list of {length}")
    return value


def whole(value: object, where: str) -> int:
    """Return `value`, which must be an int from 0 on that 8 bytes can hold; else raise ConfigurationError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        refuse(f"a number in {where}", value, "a whole number from 0 on")
    return value


_FIX = "nothing was changed; load another checkpoint, or start without one"


def refuse(what: str, value: object, rule: str) -> NoReturn:
    """Raise ConfigurationError: `what`, of a checkpoint, is `value` and must be what `rule` says."""
    if isinstance(value, Tensor):
        shown = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} ({value.layout}, {value.device})"
    else:
        shown = reprlib.repr(value)
    raise ConfigurationError(f"the checkpoint is damaged: {what} is {shown}, and must be {rule}; {_FIX}")
