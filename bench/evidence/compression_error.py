# SPDX-License-Identifier: Apache-2.0
"""How much compressors leave out of real gradients: `python -m bench.evidence.compression_error --json FILE`.

Trains the demo's GPT in this process, as one node of the demo sees it (the batches of its ranks together), and encodes
its gradient, laid out as DDP would, at several steps: relative L2 error of one encoding without feedback.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from bench.environment import machine
from bench.kernels.cases import timed_compressors
from commopt import Compressor
from commopt.command_line import CommandParser, output_file, whole
from commopt.compress import Encoding
from examples.train_gpt import GPT, load_corpus, windows_at

STEPS = (0, 5, 20, 50, 100, 200)
RANKS_PER_NODE = 2
BATCH = 2 * RANKS_PER_NODE  # windows per node and step


def flat_gradients(batch: int, layers: int = 6, width: int = 256, context: int = 64) -> Iterator[torch.Tensor]:
    """Yield the flat gradient, float32, of one step after the other, for as long as asked."""
    torch.manual_seed(0)
    model = GPT(layers, width, context)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 10, total_iters=10)
    text, _ = load_corpus()
    while True:
        starts = torch.randint(len(text) - context, (batch,))
        tokens, targets = windows_at(text, starts, context, torch.device("cpu"))
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        # DDP fills its buckets from the last layer on.
        yield torch.cat([p.grad.flatten() for p in reversed(list(model.parameters())) if p.grad is not None])
        optimizer.step()
        warm_up.step()


def relative_error(compressor: Compressor, values: torch.Tensor) -> float:
    """Encode and decode `values` once; return what is missing, relative to their L2 norm."""
    chunk_numel = -(-values.numel() // compressor.granularity) * compressor.granularity
    payload = torch.empty(1, compressor.payload_nbytes(chunk_numel), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    compressor.compress(values, payload, Encoding(chunk_numel))
    compressor.decompress(payload, decoded, chunk_numel)
    return float((values - decoded).norm() / values.norm())


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = CommandParser(prog="python -m bench.evidence.compression_error", description=__doc__)
    parser.add_argument("--batch", type=whole(1), default=BATCH, help="windows per node and step (default 4)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    made = zip(range(max(STEPS) + 1), flat_gradients(options.batch), strict=False)
    taken = {step: values for step, values in made if step in STEPS}
    print("step".ljust(60), *(f"{step:>7}" for step in taken))
    rows = []
    for compressor in timed_compressors():
        errors = {step: relative_error(compressor, values) for step, values in taken.items()}
        print(repr(compressor).ljust(60), *(f"{error:7.4f}" for error in errors.values()))
        rows.append({"compressor": repr(compressor), "relative_error_by_step": errors})
    if options.json is not None:
        command = f"python -m bench.evidence.compression_error --batch {options.batch}"
        environment = {**machine(), "command": command}
        options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
