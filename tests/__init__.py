# SPDX-License-Identifier: Apache-2.0
"""Tests; a package so that `tests.ranks` also serves the benches."""
