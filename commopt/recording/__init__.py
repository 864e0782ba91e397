"""What happened when on this rank: buckets, messages and the collectives inside them."""

from commopt.recording.clock import Clock, Mark, clock_for
from commopt.recording.current import current, helping, primitive, running
from commopt.recording.message import Message
from commopt.recording.recorder import Recorder
from commopt.recording.records import BucketRecord, MessageRecord, Span, StepRecord

__all__ = [
    "BucketRecord",
    "Clock",
    "Mark",
    "Message",
    "MessageRecord",
    "Recorder",
    "Span",
    "StepRecord",
    "clock_for",
    "current",
    "helping",
    "primitive",
    "running",
]
