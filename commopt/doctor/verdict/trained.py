# SPDX-License-Identifier: Apache-2.0
"""From a recorded training to the verdict at its end: pure, and of nothing but what the recording tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from commopt.display import significant
from commopt.doctor.verdict.causes import BUSY_SHARE, LATE_SHARE, LEAST_SHARE, Cause, late_rank
from commopt.doctor.verdict.facts import Leg, Measurements, Overlap, Training
from commopt.doctor.verdict.gain import WORTH, shown
from commopt.doctor.verdict.judge import AS_IT_SHOULD_BE, FINE, SLOW, SLOWER, Row, Verdict, tried_first
from commopt.errors import ConfigurationError
from topology.network import rate_text

LONG_NBYTES = 1 << 20
"""Of a collective: from that length on its rate is the link's, and not its latency's."""
FEW, LARGE, MOST = 0.2, 0.3, 0.5
_BACKWARD = 2 / 3  # of forward and backward
_RUN = "torchrun ... -m commopt run --strategy"
_SIXTEEN = "hierarchical_bf16"


def judge_training(found: Measurements) -> Verdict:
    """Return the verdict on a recorded training: what is exposed, who is waited for, why, and what to try.

    Raises ConfigurationError where no step was recorded.
    """
    training = found.training
    if training is None or not training.recorded:
        raise ConfigurationError("no step of a training was recorded; train for some steps with --report")
    causes = tuple(sorted(_causes(found, training), key=lambda cause: -(cause.weight or 0.0)))
    status = SLOWER if causes or training.exposed_share >= WORTH else AS_IT_SHOULD_BE
    return Verdict(
        status,
        _sentence(found, training),
        tuple(map(_row, found.legs)),
        causes,
        _first(training, causes),
        _not_expected(found, training),
        replace(training, gains=shown(training.gains)),
        tuple(_notes(found, training)),
        found.overlap,
    )


# --------------------------------------------------------------------------------------------- the sentence


def _sentence(found: Measurements, training: Training) -> str:
    exposed = f"{training.exposed_share:.0%} of a step of {significant(training.step_ms)} ms is exposed communication"
    return f"{exposed}, and {_waits(found, training)}."


def _waits(found: Measurements, training: Training) -> str:
    if _is_late(training):
        where = f" on {training.late_node}" if training.late_node else ""
        return f"all wait for rank {training.late_rank}{where}, which is {significant(training.late_ms)} ms late"
    if _waiting_ms(found) >= LATE_SHARE * training.step_ms:
        return f"ranks wait {significant(_waiting_ms(found))} ms for each other, for none in particular"
    return "no rank is waited for"


def _is_late(training: Training) -> bool:
    return training.late_rank >= 0 and training.late_ms >= LATE_SHARE * training.step_ms


def _waiting_ms(found: Measurements) -> float:
    return 0.0 if found.overlap is None else found.overlap.waiting_ms


# ----------------------------------------------------------------------------------------------- causes


def _causes(found: Measurements, training: Training) -> Iterator[Cause]:
    yield from late_rank(found)
    waiting_ms = _waiting_ms(found)
    if not _is_late(training) and waiting_ms >= LATE_SHARE * training.step_ms:
        text = f"ranks wait {significant(waiting_ms)} ms a step for each other, another one each time: "
        busy = None if found.overlap is None else found.overlap.hosts_busy
        if busy is not None and busy > BUSY_SHARE:
            text += f"programs of a host wait for a CPU in {busy:.0%} of the time"
            yield from _of(training, waiting_ms, text, "top -b -n 1 | head -20")
        else:
            yield from _of(training, waiting_ms, text + "uneven batches, or an uneven model", "")
    if training.exposed_share < WORTH:
        return
    if found.overlap is not None:
        yield from _of_overlap(found.overlap, training)
    yield from _of_legs(found.legs, training)


def _of(training: Training, saved_ms: float, text: str, remedy: str) -> Iterator[Cause]:
    """Yield a cause by what a step would take without it, if that is worth a word."""
    if saved_ms >= WORTH * training.step_ms:
        yield Cause(training.step_ms / max(training.step_ms - saved_ms, 0.01 * training.step_ms), text, remedy)


def _of_overlap(overlap: Overlap, training: Training) -> Iterator[Cause]:
    remedy = "torchrun ... -m commopt run --option plan=adaptive ... train.py"
    remedy = remedy if overlap.movable and not overlap.planned else ""
    backward_ms = None if overlap.passes_ms is None else _BACKWARD * overlap.passes_ms
    if overlap.messages == 1:
        own = "" if overlap.movable else "; call fully_shard on every block"
        text = f"the only message begins after the last gradient, so that backward hides none of its transfer{own}"
        yield from _of(training, min(training.exposed_ms, backward_ms or training.exposed_ms), text, remedy)
    elif backward_ms is not None and overlap.window_ms < FEW * backward_ms:
        text = (
            f"the first of {overlap.messages} messages is ready {significant(overlap.window_ms)} ms before the last "
            f"gradient, in a backward of about {significant(backward_ms)} ms, so that hardly any can be hidden"
        )
        yield from _of(training, min(training.exposed_ms, backward_ms - overlap.window_ms), text, remedy)
    elif (
        overlap.last_share >= LARGE
        and overlap.last_ms >= MOST * training.exposed_ms
        and overlap.last_queue_ms < FEW * overlap.last_ms
    ):
        text = (
            f"the last message ({overlap.last_label}), {overlap.last_share:.0%} of all bytes, begins with the last "
            f"gradient: nothing hides its {significant(overlap.last_ms)} ms"
        )
        saved_ms = min(training.exposed_ms, overlap.last_ms / 2, overlap.window_ms)
        yield from _of(training, saved_ms, text, remedy)
    if overlap.local_ms > MOST * overlap.transfer_ms:
        text = (
            f"packing, compressing and adding up take {significant(overlap.local_ms)} of "
            f"{significant(overlap.transfer_ms)} ms of transfer: compiled kernels may be missing"
        )
        saved_ms = min(training.exposed_ms, overlap.local_ms / 2)
        yield from _of(training, saved_ms, text, "python -m commopt --version")


def _of_legs(legs: Sequence[Leg], training: Training) -> Iterator[Cause]:
    for leg in legs:
        if leg.expected_gbps is not None and _is_slow(leg):
            text = (
                f"{leg.name} {rate_text(leg.gbps)} of {rate_text(leg.expected_gbps)} ({leg.source}) were reached while "
                f"messages were under way"
            )
            saved_ms = (1 - leg.gbps / leg.expected_gbps) * training.exposed_ms
            yield from _of(training, saved_ms, text, "torchrun ... -m commopt doctor --measure")
    across = next((leg for leg in legs if leg.name != "inside a node" and leg.form == "float32"), None)
    narrow = next((gain for gain in training.gains if gain.strategy == _SIXTEEN), None)
    if across is not None and narrow is not None:
        where = across.name if across.name.startswith("between") else f"between {across.name}"
        text = f"float32 goes {where}, {_size(across.nbytes)} a step, where 16 bits would do"
        yield from _of(training, training.step_ms - narrow.step_ms, text, f"{_RUN} {_SIXTEEN} train.py")


def _is_slow(leg: Leg) -> bool:
    if leg.expected_gbps is None or leg.largest_nbytes < LONG_NBYTES:
        return False
    return leg.gbps < LEAST_SHARE * leg.expected_gbps


# ------------------------------------------------------------------------------------- table and endings


def _row(leg: Leg) -> Row:
    should = "" if leg.expected_gbps is None else rate_text(leg.expected_gbps)
    verdict = ""
    if leg.expected_gbps is not None:
        slow, short = leg.gbps < LEAST_SHARE * leg.expected_gbps, leg.largest_nbytes < LONG_NBYTES
        verdict = FINE if not slow else "short messages" if short else SLOW
    return Row(
        leg.name,
        rate_text(leg.gbps),
        should,
        verdict,
        leg.gbps,
        leg.expected_gbps,
        f"{leg.form} {_size(leg.nbytes)}".strip(),
        f"{leg.hidden_share:.0%}",
    )


def _size(nbytes: int) -> str:
    if nbytes < 1e5:
        return f"{significant(nbytes / 1e3)} kB"
    return f"{significant(nbytes / 1e6)} MB"


def _first(training: Training, causes: Sequence[Cause]) -> str:
    """Return the remedy of the heaviest cause, or the strategy to try where that saves more."""
    cause = next((cause for cause in causes if cause.remedy), None)
    if not training.gains:
        return "" if cause is None else cause.remedy
    name = tried_first(training.gains)
    step_ms = next(gain.step_ms for gain in training.gains if gain.strategy == name)
    if cause is not None and (cause.weight or 0.0) * step_ms >= training.step_ms:
        return cause.remedy
    return f"{_RUN} {name} train.py"


def _not_expected(found: Measurements, training: Training) -> str:
    if training.exposed_share < WORTH:
        return f"a gain from another strategy: {training.exposed_share:.0%} of a step is all there is to win"
    if training.note and not training.gains:
        used = training.strategy or "stock DDP"
        return f"a gain from another strategy: of all that were predicted none is faster than {used}"
    limit = training.step_ms / max(training.step_ms - training.exposed_ms, 1e-9)
    waits = _is_late(training) or _waiting_ms(found) >= LATE_SHARE * training.step_ms
    more = " while ranks wait for each other" if waits else ""
    return f"more than {limit:.2g} times the speed from any strategy{more}: the rest is not communication"


def _notes(found: Measurements, training: Training) -> Iterator[str]:
    if found.unrecorded:
        yield f"Not recorded: {found.unrecorded}."
    if training.gains and training.note:
        yield f"{training.note}."
    if training.late_place and _is_late(training):
        yield f"Rank {training.late_rank} falls behind {training.late_place}."
