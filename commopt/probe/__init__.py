# SPDX-License-Identifier: Apache-2.0
"""Measure what messages and compression cost here: `torchrun ... -m commopt probe -o links.json`."""

from commopt.probe.operations import ProbeOptions
from commopt.probe.prober import LinkProber, Survey, probe, survey

__all__ = ["LinkProber", "ProbeOptions", "Survey", "probe", "survey"]
