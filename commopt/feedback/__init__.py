"""Error feedback: what compression left out is kept by parameter and range, and added to the next gradient."""

from commopt.feedback.account import Account
from commopt.feedback.checkpoint import layout_of, pieces_of, restore, save, spread
from commopt.feedback.config import Feedback
from commopt.feedback.layout import Layout, Piece
from commopt.feedback.ledger import Kind, Ledger, Slot
from commopt.feedback.policy import Spans, split

__all__ = [
    "Account",
    "Feedback",
    "Kind",
    "Layout",
    "Ledger",
    "Piece",
    "Slot",
    "Spans",
    "layout_of",
    "pieces_of",
    "restore",
    "save",
    "split",
    "spread",
]
