# SPDX-License-Identifier: Apache-2.0
"""Timestamps of one rank's steps: buckets, messages and the collectives inside them."""

from commopt.recording.gradients import GradientTimes
from commopt.recording.recorder import (
    Clock,
    Mark,
    MessageRecorder,
    Recorder,
    clock_for,
    primitive,
    running,
)
from commopt.recording.records import BucketRecord, MessageRecord, Span, StepRecord

__all__ = [
    "BucketRecord",
    "Clock",
    "GradientTimes",
    "Mark",
    "MessageRecord",
    "MessageRecorder",
    "Recorder",
    "Span",
    "StepRecord",
    "clock_for",
    "primitive",
    "running",
]
