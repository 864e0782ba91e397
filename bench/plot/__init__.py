# SPDX-License-Identifier: Apache-2.0
"""Draw what benchmarks found, from their files alone.

python -m bench.plot                            # every figure of bench/results, into docs/images
python -m bench.plot out.json -o out.png        # one
"""
