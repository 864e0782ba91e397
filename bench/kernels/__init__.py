"""How close every kernel comes to the memory's speed: `python -m bench.kernels --json FILE`.

Each is timed beside a clone of the same gradient, in turns: on a GPU the kernel and the plain torch it replaces, on the
CPU plain torch alone, which is all there is. GB/s count what must be read and written, once.
"""
