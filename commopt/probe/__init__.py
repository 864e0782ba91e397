"""Measure what messages and compression cost here: `torchrun ... -m commopt probe -o links.json`."""

from commopt.probe.settings import Settings
from commopt.probe.surveyor import Survey, probe, survey

__all__ = ["Settings", "Survey", "probe", "survey"]
