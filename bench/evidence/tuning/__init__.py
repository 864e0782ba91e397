# SPDX-License-Identifier: Apache-2.0
"""What commopt's tuner chooses against every choice it had: `python -m bench.cluster ... -m bench.evidence.tuning`."""
