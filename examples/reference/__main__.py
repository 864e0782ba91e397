# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.reference`: run all examples."""

from __future__ import annotations

import os
import tempfile

import torch.distributed as dist

from examples.reference import examples, run

if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, example in examples().items():
        print(f"--- {name}")
        run(example)
    dist.destroy_process_group()
