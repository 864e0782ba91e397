# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.cluster` in the checkout: the same as `commopt cluster`."""

import sys

from commopt.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["cluster", *sys.argv[1:]]))
