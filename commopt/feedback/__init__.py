# SPDX-License-Identifier: Apache-2.0
"""Error feedback: residuals are stored by parameter and range, and added to the next gradient."""

from commopt.feedback.checkpoint import (
    collect,
    layout_of,
    pieces_of,
    restore,
    restore_shared,
    save,
    save_shared,
    settle,
    spread,
)
from commopt.feedback.context import (
    SAMPLE_EVERY_STEPS,
    SAMPLE_NUMEL,
    BufferContext,
    Feedback,
    require_feedback,
    require_repeatable,
    scale_and_add,
)
from commopt.feedback.counts import ParameterSteps, StepCounts
from commopt.feedback.factors import Factors, FactorStore, Side
from commopt.feedback.layout import Layout, Piece, Spans, checked_patterns, gaps, joined_spans, matches
from commopt.feedback.quality import EVERY_STEPS, ExactSample, falls_behind, sample_numel, sample_stride
from commopt.feedback.residual import (
    ANCHOR,
    EXP_AVG,
    EXP_AVG_SQ,
    MOMENTUM_BUFFER,
    Residual,
    ResidualKind,
    is_average,
)
from commopt.feedback.scratch import Scratch
from commopt.feedback.store import ResidualStore
from commopt.feedback.transaction import Staged, Transaction

__all__ = [
    "ANCHOR",
    "EVERY_STEPS",
    "EXP_AVG",
    "EXP_AVG_SQ",
    "MOMENTUM_BUFFER",
    "SAMPLE_EVERY_STEPS",
    "SAMPLE_NUMEL",
    "BufferContext",
    "ExactSample",
    "FactorStore",
    "Factors",
    "Feedback",
    "Layout",
    "ParameterSteps",
    "Piece",
    "Residual",
    "ResidualKind",
    "ResidualStore",
    "Scratch",
    "Side",
    "Spans",
    "Staged",
    "StepCounts",
    "Transaction",
    "checked_patterns",
    "collect",
    "falls_behind",
    "gaps",
    "is_average",
    "joined_spans",
    "layout_of",
    "matches",
    "pieces_of",
    "require_feedback",
    "require_repeatable",
    "restore",
    "restore_shared",
    "sample_numel",
    "sample_stride",
    "save",
    "save_shared",
    "scale_and_add",
    "settle",
    "spread",
]
