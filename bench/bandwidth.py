# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.bandwidth` in the checkout: the same as `commopt bandwidth`."""

import sys

from commopt.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["bandwidth", *sys.argv[1:]]))
