"""Does communication run beside backward on a GPU, and does anything wait? `python -m bench.overlap --json FILE`.

torch's profiler looks at a few steps of a GPT under DDP. What runs on which stream, and which calls of the host wait
for the device, is read from its trace.
"""
