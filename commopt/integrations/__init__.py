# SPDX-License-Identifier: Apache-2.0
"""Callbacks for frameworks with their own training loop. Importing a module imports its framework.

Fabric and Accelerate need none: attach the prepared model, and let Gathered write its state (docs/frameworks.md).
"""
