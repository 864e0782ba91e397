"""Error feedback: what compression left out is kept by parameter and range, and added to the next gradient."""

from commopt.feedback.account import Account
from commopt.feedback.checkpoint import layout_of, pieces_of, restore, save, spread
from commopt.feedback.config import Feedback, checked_patterns, require_feedback, require_repeatable
from commopt.feedback.factors import Factors, FactorStore, Shapes, Side
from commopt.feedback.layout import Layout, Piece
from commopt.feedback.ledger import Kind, Ledger, Slot
from commopt.feedback.policy import Spans, matches, split

__all__ = [
    "Account",
    "FactorStore",
    "Factors",
    "Feedback",
    "Kind",
    "Layout",
    "Ledger",
    "Piece",
    "Shapes",
    "Side",
    "Slot",
    "Spans",
    "checked_patterns",
    "layout_of",
    "matches",
    "pieces_of",
    "require_feedback",
    "require_repeatable",
    "restore",
    "save",
    "split",
    "spread",
]
