"""A workload in a JSON file, written by a person, by a script or by `save`.

{
 "format": 1,
 "name": "my model",
 "samples": 64,
 "parameters": [
  {"name": "conv.weight", "shape": [64, 3, 7, 7], "ready_us": 9000},
  {"name": "fc.weight", "shape": [10, 64], "ready_us": 4000}
 ]
}

parameters: in the order in which forward uses them, that of `model.named_parameters()`; backward takes them from the
last to the first. Each has a name, a shape and, for all of them, either
    ready_us: when its gradient is ready, counted from the end of the last reduction (optimizer and forward come first),
    forward_flops: of its layer for one sample, 0 for biases; the GPU that is asked about then decides when it is ready.
Where there are both, ready_us counts. dtype, "float32" when left out, is that of its gradient.
samples: batch of a rank; needed with forward_flops, and to ask about another batch. optimizer_us: the part of the times
that does not grow with the batch. note: what the times rest on. These three may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from commopt.document import parse, read_text, require_text, require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.simulate.gpus import Gpu
from commopt.simulate.models import Model, Parameter
from commopt.simulate.workload import Workload, dtype_named, of_model

FORMAT = 1
_ENTRIES = ("format", "name", "samples", "note", "optimizer_us", "parameters")
_PARAMETER_ENTRIES = ("name", "shape", "dtype", "ready_us", "forward_flops")


def save(workload: Workload, path: str | Path) -> None:
    """Write a file from which `load` makes an equal workload; a line for each parameter."""
    pairs = zip(workload.units, workload.layout.pieces, strict=True)
    rows = [
        {
            "name": piece.name,
            "shape": piece.shape,
            "dtype": unit.dtype.removeprefix("torch."),
            "ready_us": unit.ready_us,
        }
        for unit, piece in pairs
    ]
    head = {name: getattr(workload, name) for name in ("name", "samples", "note", "optimizer_us")}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in {"format": FORMAT, **head}.items()]
    inner = ",\n  ".join(json.dumps(row) for row in reversed(rows))
    lines.append(f'"parameters": [\n  {inner}\n ]')
    Path(path).write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def load(
    path: str | Path, gpu: Gpu | None = None, precision: str = "fp16", efficiency: float | None = None
) -> Workload:
    """Read a workload. gpu, precision, efficiency: as for `of_model`, where the file has FLOPs instead of times.

    Raises ConfigurationError, naming what is wrong, for anything else.
    """
    content = parse(read_text(path), str(path))
    try:
        return _workload(content, gpu, precision, efficiency)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _workload(content: Any, gpu: Gpu | None, precision: str, efficiency: float | None) -> Workload:
    entries = _table(content, "the file", _ENTRIES)
    found = entries.get("format")
    if found != FORMAT:
        raise ConfigurationError(f"format {found!r} is not {FORMAT}, the one this version of commopt reads")
    name: Any = entries.get("name")
    samples, note = entries.get("samples", 0), entries.get("note", "")
    require_text(name, "name")
    require_whole(samples, 0, "samples")
    if not isinstance(note, str):
        raise ConfigurationError(f"note is {note!r}; it must be text")
    optimizer_us = entries.get("optimizer_us")
    if optimizer_us is not None:
        require_time(optimizer_us, "optimizer_us")
    listed = entries.get("parameters")
    if not isinstance(listed, list) or not listed:
        raise ConfigurationError("parameters must be a list of at least one parameter")
    rows = [_table(row, f"parameters[{place}]", _PARAMETER_ENTRIES) for place, row in enumerate(listed)]
    parameters = [_parameter(row, f"parameters[{place}]") for place, row in enumerate(rows)]
    dtypes = [_dtype(row, f"parameters[{place}]") for place, row in enumerate(rows)]
    if all("ready_us" in row for row in rows):
        for row in rows:
            require_time(row["ready_us"], f"parameter {row['name']!r}: ready_us")
        gradients = zip(parameters, (float(row["ready_us"]) for row in rows), dtypes, strict=True)
        return Workload.of(name, reversed(list(gradients)), samples, note, optimizer_us or 0.0)
    for row in rows:
        if "forward_flops" not in row:
            raise ConfigurationError(
                f"parameter {row['name']!r} has no forward_flops, and not all have ready_us; give all parameters "
                f"the one or the other"
            )
    if gpu is None or not samples:
        raise ConfigurationError(
            "its parameters have forward_flops instead of ready_us; say on which GPU (gpu=), and give samples in it"
        )
    if len(set(dtypes)) > 1:
        raise ConfigurationError("its parameters have forward_flops and several dtypes; give one dtype, or ready_us")
    model = Model(name, tuple(parameters), "sample")
    workload = of_model(model, gpu, samples, precision, efficiency, dtypes[0], optimizer_us)
    return replace(workload, note="; ".join(filter(None, (note, workload.note))))


def _parameter(row: Mapping[str, Any], where: str) -> Parameter:
    require_text(row.get("name"), f"{where}: name")
    shape = row.get("shape")
    if not isinstance(shape, list):
        raise ConfigurationError(f"{where}: shape is {shape!r}; it must be a list of whole numbers, [] for a scalar")
    return Parameter(row["name"], tuple(shape), row.get("forward_flops", 0))


def _dtype(row: Mapping[str, Any], where: str) -> torch.dtype:
    text = row.get("dtype", "float32")
    require_text(text, f"{where}: dtype")
    return dtype_named(text)


def _table(value: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} is {value!r:.80} where an object with a name for each value belongs")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ConfigurationError(f"{where} has an unknown entry {unknown[0]!r}; there are {', '.join(known)}")
    return value
