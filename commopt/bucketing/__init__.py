"""Which gradients travel together: DDP's buckets become messages, by a plan that is measured, made and applied here."""

from commopt.bucketing.assembly import Assembly
from commopt.bucketing.layouts import Layouts, require_same_parameters
from commopt.bucketing.messages import Held, Message, packed
from commopt.bucketing.planning import Planning
from commopt.bucketing.wish import Wish

__all__ = [
    "Assembly",
    "Held",
    "Layouts",
    "Message",
    "Planning",
    "Wish",
    "packed",
    "require_same_parameters",
]
