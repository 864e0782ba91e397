# SPDX-License-Identifier: Apache-2.0
"""How close every kernel comes to the memory's speed: `python -m bench.kernels --json FILE`.

Each is timed in turns with a device copy that moves as many bytes, with the plain torch it replaces, and with what
others offer for the same job; on a CPU there is plain torch only. GB/s count what must be read and written, once.
"""
