# SPDX-License-Identifier: Apache-2.0
"""Models of fully_shard and replicate: what FSDP2 sends between nodes goes through an aggregator.

seams holds every private name of torch; layouts says which parameters are in a buffer; state is what users hold. With
replicas, FSDP calls registration where it would all-reduce. Sharded over all ranks, it calls one_dimension for its
reduce_scatter and its all_gather, whose rows are what travels. Both put it on the lane; backwards ends a step with
each of these. Loaded by `attach` for such a model, never by `import commopt`.
"""

from commopt.sharded.all_gather import Weights
from commopt.sharded.state import OneDimensionState, ShardedState, attach_sharded

__all__ = ["OneDimensionState", "ShardedState", "Weights", "attach_sharded"]
