# SPDX-License-Identifier: Apache-2.0
"""What a training step takes on a cluster of any number of GPUs, simulated; nothing is communicated.

A workload (model_zoo, workload: when each gradient is ready) meets a cluster (cluster: what a message costs there) in a
step (step: buckets, stragglers); scaling repeats that over numbers of nodes and strategies.
"""

from commopt.simulate.cluster import GPUS, ClusterSpec, GpuSpec, NetworkSpec, gpu
from commopt.simulate.model_zoo import MODELS, Model, Parameter, model
from commopt.simulate.scaling import Scaling, ScalingPoint, Strategy, strategy
from commopt.simulate.step import Bucket, SimulatedStep, Simulation, Stragglers, ddp_buckets, simulate_step
from commopt.simulate.workload import Workload, load, of_model

__all__ = [
    "GPUS",
    "MODELS",
    "Bucket",
    "ClusterSpec",
    "GpuSpec",
    "Model",
    "NetworkSpec",
    "Parameter",
    "Scaling",
    "ScalingPoint",
    "SimulatedStep",
    "Simulation",
    "Stragglers",
    "Strategy",
    "Workload",
    "ddp_buckets",
    "gpu",
    "load",
    "model",
    "of_model",
    "simulate_step",
    "strategy",
]
