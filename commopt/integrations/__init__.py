# SPDX-License-Identifier: Apache-2.0
"""Callbacks for frameworks that have a training loop of their own; each module loads its framework when it is loaded.

Fabric and Accelerate need none: attach what they prepared, and let Gathered write its state (docs/frameworks.md).
"""
