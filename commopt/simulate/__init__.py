# SPDX-License-Identifier: Apache-2.0
"""Simulated times of a training step on a cluster of any number of GPUs; nothing is communicated.

A workload says when each gradient is ready (model_zoo, workload), a cluster what a message costs (cluster). A step puts
them together (step: buckets, stragglers), and scaling does so for numbers of nodes and strategies.
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
