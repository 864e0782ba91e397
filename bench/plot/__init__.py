# SPDX-License-Identifier: Apache-2.0
"""Draw what benchmarks found, from their files alone.

python -m bench.plot                            # the pictures that pages show, in docs/images
python -m bench.plot out.json -o out.png        # one
"""
