# SPDX-License-Identifier: Apache-2.0
"""The common part of all models that commopt is attached to, of DDP and of FSDP2.

registration  the memory of one hook or model, from its first buffer to its last
comm_state    the object that users hold: figures, checkpoints, reports
options       the options of attach: defaults, checks, which models take them
reduction     the lane's task for one buffer
checkpoint    saving and loading a registration, in the same world and in another
local_sgd     averages of parameters between steps
divergence    replicas compared by checksums
insight, log  reports, timelines and figures for loggers
checks        settings of torch that are refused or warned of
steps         callbacks around optimizer steps; optimizer_steps, averages_used and optimizers build on it
"""
