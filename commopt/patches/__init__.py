# SPDX-License-Identifier: Apache-2.0
"""Weights for whoever follows a training, bit for bit, as files: whole ones now and then, and patches between them.

`Writer` puts a file for each version into a folder, or any address of fsspec; `Reader` follows, from wherever it is.
encoding says what a file holds, storage where it lies.
"""

from commopt.patches.reader import Reader
from commopt.patches.writer import Writer

__all__ = ["Reader", "Writer"]
