# SPDX-License-Identifier: Apache-2.0
"""Typed wrappers of the GPU kernels, one module each; on other devices plain torch computes the same."""
