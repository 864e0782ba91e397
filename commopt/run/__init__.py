# SPDX-License-Identifier: Apache-2.0
"""Train with a strategy and leave the script as it is: `torchrun ... -m commopt run --strategy NAME train.py ...`."""
