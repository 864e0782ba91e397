"""GPUs by their data sheets, and the share of the peak that a training step is taken to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commopt.errors import ConfigurationError

# Assumptions, not measurements: pass your own efficiency where you know what your GPU does. What NVIDIA publishes for
# its own examples (DeepLearningExamples, one GPU) is, as a share of the peak: ResNet-50 in mixed precision 0.19 on A100
# (2470 images/s) and 0.24 on V100 (1200), in float32 on V100 0.57 (367). Faster compute than there is makes
# communication look worse than it is.
CONVOLUTION_EFFICIENCY = 0.35
TRANSFORMER_EFFICIENCY = 0.45
PLAIN_EFFICIENCY = 0.55  # fp32 without tensor cores, any model: a lower peak is easier to reach


@dataclass(frozen=True)
class Gpu:
    """Peak rates: dense TFLOP/s by precision ("fp32", "tf32", "fp16", "bf16"), and GB/s of its memory."""

    name: str
    tflops: Mapping[str, float]
    memory_gb_per_s: float

    def peak_tflops(self, precision: str) -> float:
        """Return the peak; raises ConfigurationError for a precision it does not have."""
        if precision not in self.tflops:
            raise ConfigurationError(f"{self.name} has no figure for {precision!r}; there are {', '.join(self.tflops)}")
        return self.tflops[precision]


# NVIDIA's data sheets and architecture white papers; no sparsity, fp16 and bf16 on tensor cores that add in float32.
_TABLE = (
    Gpu("p100", {"fp32": 10.6}, 732),  # Tesla P100 SXM2
    Gpu("v100", {"fp32": 15.7, "fp16": 125}, 900),  # V100 SXM2
    Gpu("t4", {"fp32": 8.1, "fp16": 65}, 320),
    Gpu("a10", {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}, 600),
    Gpu("a100", {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 2039),  # A100 SXM 80 GB
    Gpu("h100", {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989}, 3350),  # H100 SXM
    Gpu("h200", {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989}, 4800),  # H200 SXM
    Gpu("rtx3090", {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71}, 936),  # GA102 white paper
    Gpu("rtx4090", {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2}, 1008),  # Ada white paper
)
GPUS: dict[str, Gpu] = {each.name: each for each in _TABLE}


def gpu(name: str) -> Gpu:
    """Return the GPU of that name; raises ConfigurationError when there is none."""
    if name not in GPUS:
        raise ConfigurationError(f"GPU {name!r} is unknown; there are {', '.join(GPUS)}")
    return GPUS[name]


def usual_efficiency(precision: str, *, convolutional: bool) -> float:
    """Return the share of the peak that a step reaches, forward and backward together, by assumption."""
    if precision == "fp32":
        return PLAIN_EFFICIENCY
    return CONVOLUTION_EFFICIENCY if convolutional else TRANSFORMER_EFFICIENCY
