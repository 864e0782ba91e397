# SPDX-License-Identifier: Apache-2.0
"""The judge: from the records of a run, and of runs without fault, to a verdict. A pure function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from commopt.chaos.faults import FAULTS, Fault

Outcome = Literal["right", "named error", "hang", "wrong model", "unnamed error"]
OUTCOMES: tuple[Outcome, ...] = ("right", "named error", "hang", "wrong model", "unnamed error")
FAILURES: tuple[Outcome, ...] = ("hang", "wrong model", "unnamed error")

LOSS_WITHIN = 0.1  # relative, where two runs without fault do not end with the same bits
_SHOWN = 160


@dataclass(frozen=True)
class NotedStep:
    """A step of a rank.

    finite: whether all gradients were. any_finite: whether any was.
    residual: the norm after it, as text where it is not finite.
    """

    number: int
    finite: bool
    any_finite: bool
    residual: float | str | None
    loss: float | None = None


@dataclass(frozen=True)
class RankRecord:
    """How a rank ended.

    status: its exit status; None where it was stuck, and killed.
    exited_s: when its process was gone.
    noticed_s: when its script ended, or raised; None where neither was seen.
    error: what it raised, "" for nothing. named: the error of commopt behind it.
    digest: of its parameters, where it ended well.
    pulled: of a parameter server's worker, the rounds that it pulled, each with a digest.
    done: of a parameter server, the work of all deltas that counted; of its worker, that of its own.
    """

    status: int | None
    exited_s: float
    noticed_s: float | None = None
    error: str = ""
    named: str | None = None
    digest: str | None = None
    steps: tuple[NotedStep, ...] = ()
    pulled: tuple[tuple[int, str], ...] = ()
    done: float | None = None

    @classmethod
    def of(cls, status: int | None, exited_s: float, events: Sequence[dict[str, Any]]) -> RankRecord:
        """Return the record of a journal."""
        steps = tuple(
            NotedStep(event["step"], event["finite"], event["any_finite"], event["residual"], event["loss"])
            for event in events
            if event["event"] == "step"
        )
        end = next((event for event in events if event["event"] == "end"), {})
        error, named, digest = end.get("error", ""), end.get("named"), end.get("digest")
        pulled = tuple((event["round"], event["digest"]) for event in events if event["event"] == "pulled")
        done = next((event["done"] for event in reversed(events) if event.get("done") is not None), None)
        return cls(status, exited_s, end.get("t"), error, named, digest, steps, pulled, done)


@dataclass(frozen=True)
class RunRecord:
    """A run. Times are in seconds on one clock.

    fault: "" for none. cut: the ranks of the victim's node. server: which of `ranks` is a parameter server, if any.
    """

    strategy: str
    fault: str
    victim: int
    cut: tuple[int, ...]
    begun_s: float
    struck_s: float | None
    ranks: tuple[RankRecord, ...]
    server: int | None = None

    @property
    def left(self) -> list[int]:
        """The ranks that the fault has not killed."""
        return [rank for rank in range(len(self.ranks)) if (self.fault, rank) != ("kill", self.victim)]


@dataclass(frozen=True)
class RunVerdict:
    """How a run ended. seconds: from the fault to the last rank that ended or noticed. said: in words, why."""

    outcome: Outcome
    ok: bool
    seconds: float
    said: str


@dataclass(frozen=True)
class Reference:
    """Runs without a fault, of one strategy: what is right. tuned: the strategy follows times, which faults change."""

    runs: Sequence[RunRecord]
    tuned: bool = False
    problem: str = field(init=False)

    def __post_init__(self) -> None:
        failed = [(run, rank) for run in self.runs for rank, each in enumerate(run.ranks) if each.digest is None]
        problem = ""
        if failed:
            run, rank = failed[0]
            why = run.ranks[rank].error or "it was stuck, or died"
            problem = f"without any fault rank {rank} did not end well: {gist(why)}"
        object.__setattr__(self, "problem", problem)

    @property
    def reproducible(self) -> bool:
        """Whether all of them end with the same bits."""
        return not self.tuned and len({tuple(each.digest for each in run.ranks) for run in self.runs}) == 1

    def differs(self, run: RunRecord, rank: int) -> str:
        """Return why the model of a rank is not right, "" where it is."""
        mine = run.ranks[rank].digest
        if self.reproducible:
            right = self.runs[0].ranks[rank].digest
            return "" if mine == right else f"rank {rank} ends with other parameters ({mine}, right is {right})"
        alike = [
            other for other, each in enumerate(self.runs[0].ranks) if each.digest == self.runs[0].ranks[rank].digest
        ]
        for other in alike:
            if run.ranks[other].digest not in (mine, None):
                return f"ranks {rank} and {other} end with different parameters"
        losses = [last_loss(each.ranks[rank]) for each in self.runs]
        spread = max(losses) - min(losses)
        mean, loss = sum(losses) / len(losses), last_loss(run.ranks[rank])
        if abs(loss - mean) <= max(LOSS_WITHIN * abs(mean), 3 * spread):
            return ""
        return f"rank {rank} ends with a loss of {loss:.4g}, and without the fault with {mean:.4g}"


def judge(run: RunRecord, reference: Reference, limit_s: float, timeout_s: float) -> RunVerdict:
    """Return how a run ended whose ranks need each other.

    limit_s: within which every rank has to notice a fault. timeout_s: of the strategy's collectives.
    """
    fault, left = FAULTS[run.fault], run.left
    if (found := hung(run, reference, limit_s)) is not None:
        return found

    def verdict(outcome: Outcome, said: str, ok: bool = True) -> RunVerdict:
        return verdict_on(run, outcome, said, ok)

    for rank in left:
        if wrong := _unnamed(run, rank, fault):
            return verdict("unnamed error", wrong)
    for rank in left:
        if run.ranks[rank].digest is not None:
            wrong = _nan_went_wrong(run, rank) if run.fault == "nan" else reference.differs(run, rank)
            if wrong:
                return verdict("wrong model", wrong)
    told = [run.ranks[rank].named or run.ranks[rank].error for rank in left if run.ranks[rank].error]
    if not told:
        what = "same bits" if reference.reproducible else "same loss, replicas alike"
        return verdict("right", "NaN on every rank, residuals unchanged" if run.fault == "nan" else what)
    said = Counter(gist(each, _guilty(run, left[0], fault)) for each in told).most_common(1)[0][0]
    if fault.fatal or run.fault in ("nan", "slow") or fault.lasts_s >= timeout_s:
        return verdict("named error", said)
    return verdict("named error", f"training could have gone on: {said}", ok=False)


def verdict_on(run: RunRecord, outcome: Outcome, said: str, ok: bool = True) -> RunVerdict:
    """Return a verdict. ok: False where even such an outcome is none that is wanted."""
    from_s = run.begun_s if run.struck_s is None else run.struck_s
    seconds = max((run.ranks[rank].noticed_s or run.ranks[rank].exited_s) - from_s for rank in run.left)
    return RunVerdict(outcome, ok and outcome not in FAILURES, seconds, said)


def hung(run: RunRecord, reference: Reference, limit_s: float) -> RunVerdict | None:
    """Return the verdict on a run that shows nothing of the fault, or in which a rank hangs; None for others."""
    if reference.problem:
        return verdict_on(run, "unnamed error", reference.problem)
    failed = next((rank for rank, each in enumerate(run.ranks) if each.digest is None), None)
    if run.struck_s is None and failed is not None:
        why = gist(run.ranks[failed].error or "it was stuck, or died")
        return verdict_on(run, "unnamed error", f"before the fault rank {failed} did not end well: {why}")
    if run.struck_s is None:
        said = "the script ended before the fault; give it more steps, or an earlier --at"
        return verdict_on(run, "right", said, ok=False)
    for rank in run.left:
        if stuck := _stuck(run, rank, run.struck_s, limit_s):
            return verdict_on(run, "hang", stuck)
    return None


def _stuck(run: RunRecord, rank: int, from_s: float, limit_s: float) -> str:
    """Return why a rank counts as one that hangs, "" where it does not."""
    mine = run.ranks[rank]
    if mine.status is None and mine.noticed_s is None:
        last = mine.steps[-1].number if mine.steps else 0
        return f"rank {rank} was stuck after step {last} until it was killed"
    if mine.status is None:
        return f"the process of rank {rank} did not end after {gist(mine.error) or 'its script'}"
    if mine.error and mine.noticed_s is not None and mine.noticed_s - from_s > limit_s:
        return f"rank {rank} noticed only after {mine.noticed_s - from_s:.1f} s: {gist(mine.error)}"
    return ""


def _unnamed(run: RunRecord, rank: int, fault: Fault) -> str:
    """Return what is wrong with the error of a rank, "" where it names the fault, or where there is none."""
    mine = run.ranks[rank]
    if mine.noticed_s is None:
        return f"rank {rank} died without a word, with status {mine.status}"
    if not mine.error:
        return "" if mine.status == 0 else f"rank {rank} ended with status {mine.status} after its script"
    if rank == run.victim and fault.cause:
        return "" if re.search(fault.cause, mine.error) else f"rank {rank} does not say why: {gist(mine.error)}"
    if mine.named is None:
        return f"rank {rank} raised no error of commopt: {gist(mine.error)}"
    guilty = _guilty(run, rank, fault)
    has_lost_the_store = (rank in run.cut) != (0 in run.cut)  # it is on rank 0's node
    if has_lost_the_store and fault.of_link and "store" in mine.named:
        return ""
    if named_ranks(mine.named) & guilty:
        return ""
    return f"rank {rank} names none of {sorted(guilty)}: {gist(mine.named)}"


def _guilty(run: RunRecord, rank: int, fault: Fault) -> set[int]:
    """Return the ranks of which a rank may say that they are at fault: of a link it is those at the other end."""
    if not fault.of_link:
        return {run.victim}
    cut = set(run.cut)
    return set(range(len(run.ranks))) - cut if rank in cut else cut


def named_ranks(text: str) -> set[int]:
    """Return the ranks that a message names."""
    found = re.findall(r"\branks? (\d+(?:(?:, | and )\d+)*)", text)
    return {int(number) for each in found for number in re.findall(r"\d+", each)}


def _nan_went_wrong(run: RunRecord, rank: int) -> str:
    """Return what a NaN did that it must not: stay away from a rank, or change a residual."""
    steps = run.ranks[rank].steps
    if all(step.finite for step in steps):
        return f"the NaN of rank {run.victim} never reached rank {rank}"
    before: NotedStep | None = None
    for step in steps:
        if step.residual is None:  # the script has closed its groups
            continue
        if isinstance(step.residual, str):
            return f"the residuals of rank {rank} are {step.residual} after step {step.number}"
        if not step.any_finite and before is not None and step.residual != before.residual:
            return (
                f"the residuals of rank {rank} changed in step {step.number}, which was not finite: from norm "
                f"{before.residual} to {step.residual}"
            )
        before = step
    return ""


def last_loss(record: RankRecord, share: float = 1.0) -> float:
    """Return the mean loss of the last quarter of the steps, or of the first ones, this share; NaN for none."""
    steps = record.steps[: round(share * len(record.steps))]
    losses = [float("nan") if step.loss is None else step.loss for step in steps]
    losses = losses[-max(1, len(losses) // 4) :]
    return sum(losses) / len(losses) if losses else float("nan")


def gist(text: str, guilty: Collection[int] = ()) -> str:
    """Return the gist of a message: the first clause that names a guilty rank, and the last cause of a traceback."""
    clauses = [each.strip() for each in re.split(r":\s|;\s|\n", text) if each.strip()]
    found = next((each for each in clauses if named_ranks(each) & set(guilty)), text.partition("\n")[0])
    causes = re.findall(r"^([\w.]+(?:Error|Exception|Interrupt): .+)", text, re.M)
    if "Traceback" in text and causes:
        found = f"{found}: {causes[-1]}"
    return found if len(found) <= _SHOWN else f"{found[: _SHOWN - 3]}..."
