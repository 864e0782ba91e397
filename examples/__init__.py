# SPDX-License-Identifier: Apache-2.0
"""Tutorials: each file runs by itself and is tested."""
