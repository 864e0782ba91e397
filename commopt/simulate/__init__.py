"""What a training step takes on a cluster of any number of GPUs, simulated; nothing is communicated.

A workload (models, gpus, workload: when each gradient is ready) meets a cluster (network, work: what a message costs
there) in a step (buckets, planning, events, stragglers); scaling repeats that over numbers of nodes and strategies.
"""

from commopt.simulate.buckets import ddp_buckets
from commopt.simulate.cluster import Cluster
from commopt.simulate.gpus import GPUS, Gpu, gpu
from commopt.simulate.models import MODELS, model
from commopt.simulate.network import Network
from commopt.simulate.scaling import Row, Scaling
from commopt.simulate.step import Outcome, Simulation, simulate_step
from commopt.simulate.stragglers import Stragglers
from commopt.simulate.strategies import Strategy, strategy
from commopt.simulate.workload import Workload, of_model, of_window
from commopt.simulate.workload_file import load, save

__all__ = [
    "GPUS",
    "MODELS",
    "Cluster",
    "Gpu",
    "Network",
    "Outcome",
    "Row",
    "Scaling",
    "Simulation",
    "Stragglers",
    "Strategy",
    "Workload",
    "ddp_buckets",
    "gpu",
    "load",
    "model",
    "of_model",
    "of_window",
    "save",
    "simulate_step",
    "strategy",
]
