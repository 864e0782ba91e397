# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of commopt, and the emulated cluster they run on."""
