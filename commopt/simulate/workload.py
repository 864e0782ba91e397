"""A training step of one rank without communication: when each gradient is ready, computed, measured or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from commopt.document import one_line_each, parse, read_text, require_text, require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.schedule import Unit, Window
from commopt.simulate.cluster import Gpu, usual_efficiency
from commopt.simulate.model_zoo import Model, Parameter

BACKWARD_PER_FORWARD = 2  # gradients of the inputs and of the weights: a product each, as large as forward's
# SGD with momentum on float32: parameter, momentum and gradient are read, parameter and momentum written.
OPTIMIZER_PASSES = 5
_OPTIMIZER_BYTES = OPTIMIZER_PASSES * torch.float32.itemsize

FORMAT = 1
_ENTRIES = ("format", "name", "samples", "note", "optimizer_us", "parameters")
_PARAMETER_ENTRIES = ("name", "shape", "dtype", "ready_us", "forward_flops")


@dataclass(frozen=True)
class Workload:
    """A step counts from the end of the last reduction: optimizer, forward, backward.

    units: one for each parameter, in the order of backward. layout: the same parameters with their shapes.
    samples: batch of a rank; 0 when unknown. note: what the times rest on.
    optimizer_us: how much of each time does not grow with the batch.

    Raises ConfigurationError when units and layout differ, or a gradient is ready within optimizer_us.
    """

    name: str
    units: tuple[Unit, ...]
    layout: Layout
    samples: int
    note: str = ""
    optimizer_us: float = 0.0

    @classmethod
    def of(
        cls,
        name: str,
        gradients: Iterable[tuple[Parameter, float, torch.dtype]],
        samples: int,
        note: str = "",
        optimizer_us: float = 0.0,
    ) -> Workload:
        """Put it together from gradients in the order of backward: parameter, ready_us, dtype."""
        rows = tuple(gradients)
        units = tuple(
            Unit((parameter.name,), parameter.numel * dtype.itemsize, ready_us, str(dtype))
            for parameter, ready_us, dtype in rows
        )
        layout = Layout.of_parameters((parameter.name, parameter.shape) for parameter, _, _ in rows)
        return cls(name, units, layout, samples, note, optimizer_us)

    def __post_init__(self) -> None:
        require_text(self.name, "workload: name")
        require_whole(self.samples, 0, f"workload {self.name!r}: samples")
        require_time(self.optimizer_us, f"workload {self.name!r}: optimizer_us")
        if not self.units:
            raise ConfigurationError(f"workload {self.name!r} has no parameters; give it at least one")
        if [unit.names for unit in self.units] != [(piece.name,) for piece in self.layout.pieces]:
            raise ConfigurationError(f"workload {self.name!r}: units and layout must name the same parameters in order")
        if len(self.layout.names) < len(self.units):
            raise ConfigurationError(f"workload {self.name!r}: a parameter is in it twice; name each one once")
        first = min(self.units, key=lambda unit: unit.ready_us)
        if first.ready_us < self.optimizer_us:
            raise ConfigurationError(
                f"workload {self.name!r}: {first.names[0]!r} is ready after {first.ready_us:g} us, but the optimizer "
                f"takes {self.optimizer_us:g} us before; count ready times from the beginning of the step"
            )

    @cached_property
    def compute_us(self) -> float:
        """When the last gradient is ready."""
        return max(unit.ready_us for unit in self.units)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(unit.nbytes for unit in self.units)

    def scaled(self, batch: int) -> Workload:
        """Return the workload of another batch: forward and backward in proportion, the optimizer as it is.

        That a GPU does worse with few samples is not in it. Raises ConfigurationError when the own batch is unknown.
        """
        require_whole(batch, 1, f"workload {self.name!r}: batch")
        if batch == self.samples:
            return self
        if not self.samples:
            raise ConfigurationError(f"workload {self.name!r} does not say for how many samples it is; give samples")
        factor = batch / self.samples
        units = tuple(
            replace(unit, ready_us=self.optimizer_us + factor * (unit.ready_us - self.optimizer_us))
            for unit in self.units
        )
        note = f"{self.note}; {batch} samples from {self.samples}".removeprefix("; ")
        return replace(self, units=units, samples=batch, note=note)


def of_model(
    model: Model,
    gpu: Gpu,
    batch: int,
    precision: str = "fp16",
    efficiency: float | None = None,
    gradient_dtype: torch.dtype = torch.float32,
    optimizer_us: float | None = None,
) -> Workload:
    """Compute when gradients are ready on `gpu`: backward takes twice forward in each layer, the last layer first.

    efficiency: share of the GPU's peak, in (0, 1]; by default an assumption, see `gpus.usual_efficiency`.
    optimizer_us: by default that of SGD with momentum in float32 at the memory's peak rate, 5 passes of 4 bytes.
    """
    require_whole(batch, 1, f"workload of {model.name}: batch")
    if efficiency is None:
        efficiency = usual_efficiency(precision, convolutional=model.convolutional)
    if not (isfinite(efficiency) and 0 < efficiency <= 1):
        raise ConfigurationError(f"efficiency is {efficiency!r}; it must be above 0 and at most 1")
    peak_tflops = gpu.peak_tflops(precision)
    us_per_flop = batch / (peak_tflops * 1e6 * efficiency)
    if optimizer_us is None:
        optimizer_us = _OPTIMIZER_BYTES * model.numel / (gpu.memory_gb_per_s * 1e3)
    ready_us = optimizer_us + model.forward_flops * us_per_flop
    gradients = []
    for _, layer in groupby(reversed(model.parameters), lambda parameter: parameter.layer):
        parameters = tuple(layer)
        ready_us += BACKWARD_PER_FORWARD * us_per_flop * sum(parameter.forward_flops for parameter in parameters)
        gradients += [(parameter, ready_us, gradient_dtype) for parameter in parameters]
    note = f"{batch} x {model.sample} at {efficiency:.3g} of {peak_tflops:g} TFLOP/s ({gpu.name}, {precision})"
    return Workload.of(model.name, gradients, batch, note, optimizer_us)


def of_window(
    window: Window, shapes: Mapping[str, tuple[int, ...]], *, name: str = "measured", samples: int = 0
) -> Workload:
    """Take the ready times that a run measured; all parameters of one of its units are ready when the unit is.

    What the optimizer took is in them, unknown, and scales with the rest. Raises ConfigurationError when the shape of a
    parameter is missing, or is not that of the unit.
    """
    if not window.step_us:
        raise ConfigurationError("window: no step was measured; record some with plan='adaptive'")
    gradients = []
    for unit in window.units:
        missing = [each for each in unit.names if each not in shapes]
        if missing:
            raise ConfigurationError(f"window: the shape of {missing[0]!r} is missing; give those of all parameters")
        dtype = dtype_named(unit.dtype)
        members = [Parameter(each, tuple(shapes[each])) for each in unit.names]
        nbytes = dtype.itemsize * sum(member.numel for member in members)
        if nbytes != unit.nbytes:
            raise ConfigurationError(
                f"window: the unit of {unit.names[0]!r} has {unit.nbytes} bytes, but its shapes make {nbytes}; "
                f"give the shapes of the model that was measured"
            )
        gradients += [(member, unit.ready_us, dtype) for member in members]
    return Workload.of(name, gradients, samples, f"measured, mean of {len(window.step_us)} steps")


def dtype_named(text: str) -> torch.dtype:
    """Return the dtype of a gradient by its name, "float32" or "torch.float32"."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"dtype {text!r} is none that gradients have; give one of torch's, such as float32")
    return dtype


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
    Path(path).write_text(one_line_each({"format": FORMAT, **head, "parameters": rows[::-1]}))


def load(
    path: str | Path, gpu: Gpu | None = None, precision: str = "fp16", efficiency: float | None = None
) -> Workload:
    """Read a workload that a person, a script or `save` wrote as JSON.

    {"format": 1, "name": "my model", "samples": 64, "parameters": [
      {"name": "conv.weight", "shape": [64, 3, 7, 7], "ready_us": 9000},
      {"name": "fc.weight", "shape": [10, 64], "ready_us": 4000}]}

    parameters: in the order of forward, that of `model.named_parameters()`. Each has a name, a shape and, for all of
    them, either ready_us (when its gradient is ready, counted from the end of the last reduction) or forward_flops (of
    its layer for one sample, 0 for biases); then gpu, precision and efficiency, as for `of_model`, say when it is.
    Optional are the dtype of a gradient ("float32"), samples (the batch of a rank; needed with forward_flops, and for
    another batch), optimizer_us (the part of the times that does not grow with the batch) and note.
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
