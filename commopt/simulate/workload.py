# SPDX-License-Identifier: Apache-2.0
"""A training step of one rank without communication: when each gradient is ready, computed or from a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from commopt.document import parse, read_text, require_text, require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.schedule import Unit
from commopt.simulate.cluster import GpuSpec
from commopt.simulate.model_zoo import Model, Parameter
from commopt.simulate.throughput import BACKWARD_PER_FORWARD, usual_efficiency

# SGD with momentum on float32: parameter, momentum and gradient are read, parameter and momentum written.
OPTIMIZER_PASSES = 5
_OPTIMIZER_BYTES = OPTIMIZER_PASSES * torch.float32.itemsize

FORMAT = 1
_ENTRIES = ("format", "name", "samples", "note", "optimizer_us", "parameters")
_PARAMETER_ENTRIES = ("name", "shape", "dtype", "ready_us")


@dataclass(frozen=True)
class Workload:
    """A step counts from the end of the last reduction: optimizer, forward, backward.

    name: of the model.
    units: one for each parameter, in the order of backward.
    layout: the same parameters with their shapes.
    samples: batch of a rank; 0 when unknown.
    note: the source of the times.
    optimizer_us: the part of each time that does not grow with the batch.

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
        if not isinstance(self.note, str):
            raise ConfigurationError(f"workload {self.name!r}: note is {self.note!r}; it must be text")
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
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes."""
        nbytes: Counter[str] = Counter()
        for unit in self.units:
            nbytes[unit.dtype] += unit.nbytes
        return dtype_named(nbytes.most_common(1)[0][0])

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
    gpu: GpuSpec,
    batch: int,
    precision: str = "fp16",
    efficiency: float | None = None,
    gradient_dtype: torch.dtype = torch.float32,
    optimizer_us: float | None = None,
) -> Workload:
    """Compute when gradients are ready on `gpu`: backward takes twice forward in each layer, the last layer first.

    efficiency: share of the GPU's peak, in (0, 1]; by default from published rates, see `throughput`.
    optimizer_us: by default that of SGD with momentum in float32 at the memory's peak rate, 5 passes of 4 bytes.
    """
    require_whole(batch, 1, f"workload of {model.name}: batch")
    basis = "as given"
    if efficiency is None:
        efficiency, basis = usual_efficiency(model, gpu, precision)
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
    peak = f"{peak_tflops:g} TFLOP/s ({gpu.name}, {precision})"
    note = f"{batch} x {model.sample} at {efficiency:.3g} of {peak}, {basis}"
    return Workload.of(model.name, gradients, batch, note, optimizer_us)


def dtype_named(text: str) -> torch.dtype:
    """Return the dtype of a gradient by its name, "float32" or "torch.float32"."""
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"dtype {text!r} is none that gradients have; give one of torch's, such as float32")
    return dtype


def load(path: str | Path) -> Workload:
    """Read a workload with measured times that was written as JSON.

    {"format": 1, "name": "my model", "samples": 64, "parameters": [
      {"name": "conv.weight", "shape": [64, 3, 7, 7], "ready_us": 9000},
      {"name": "fc.weight", "shape": [10, 64], "ready_us": 4000}]}

    parameters: in the order of forward, that of `model.named_parameters()`. ready_us: when the gradient is ready,
    counted from the end of the last reduction. Optional are the dtype of a gradient ("float32"), samples (the batch of
    a rank; needed for another one), optimizer_us (the part of the times that does not grow with the batch) and note.
    Raises ConfigurationError, naming the fault, for anything else.
    """
    content = parse(read_text(path), str(path))
    try:
        entries = dict(_table(content, "the file", _ENTRIES))
        if (found := entries.pop("format", None)) != FORMAT:
            raise ConfigurationError(f"format {found!r} is not {FORMAT}, the one this version of commopt reads")
        listed = entries.pop("parameters", None)
        if not isinstance(listed, list):
            raise ConfigurationError("parameters must be a list of at least one parameter")
        gradients = [_gradient(row, f"parameters[{place}]") for place, row in enumerate(listed)]
        return Workload.of(entries.pop("name", None), reversed(gradients), **{"samples": 0} | entries)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _gradient(value: Any, where: str) -> tuple[Parameter, float, torch.dtype]:
    row = _table(value, where, _PARAMETER_ENTRIES)
    name, shape, dtype = row.get("name", ""), row.get("shape"), row.get("dtype", "float32")
    require_text(dtype, f"{where}: dtype")
    if not isinstance(shape, list):
        raise ConfigurationError(f"{where}: shape is {shape!r}; it must be a list of whole numbers, [] for a scalar")
    parameter = Parameter(name, tuple(shape))
    require_time(row.get("ready_us"), f"parameter {name!r}: ready_us")
    return parameter, float(row["ready_us"]), dtype_named(dtype)


def _table(value: Any, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} is {value!r:.80} where an object with a name for each value belongs")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ConfigurationError(f"{where} has an unknown entry {unknown[0]!r}; there are {', '.join(known)}")
    return value
