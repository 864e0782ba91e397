"""What a timeline shows, as plain data: times are means over typical steps, in microseconds."""

from __future__ import annotations

from dataclasses import dataclass

from commopt.timeline.lateness import Straggler


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, or the mean of several.

    step_us: from the end of the step before to the end of this one. compute_us: up to the last gradient.
    exposed_us: from there to the end of the last message, by which communication makes the step longer.
    hidden_us: when the lane was at work before. Of both, waiting is the time in which this rank had started a message
    that the last of the ranks in it had not.
    """

    step_us: float
    compute_us: float
    hidden_us: float
    hidden_waiting_us: float
    exposed_us: float
    exposed_waiting_us: float

    @property
    def communication_us(self) -> float:
        """All of it."""
        return self.hidden_us + self.exposed_us

    @property
    def hidden_transfer_us(self) -> float:
        """What of the hidden part is not waiting."""
        return self.hidden_us - self.hidden_waiting_us

    @property
    def exposed_transfer_us(self) -> float:
        """What of the exposed part is not waiting."""
        return self.exposed_us - self.exposed_waiting_us


@dataclass(frozen=True)
class RankTimes:
    """One rank. `late_us`: behind the median of the others at its worst bucket, median over steps; may be negative."""

    rank: int
    node: int
    times: StepTimes
    late_us: float


@dataclass(frozen=True)
class BucketTimes:
    """One of DDP's buckets; `ready_us` since the step began, on the last of the ranks."""

    number: int
    label: str
    nbytes: int
    ready_us: float


@dataclass(frozen=True)
class MessageTimes:
    """One message of a step, mean over ranks; ready and finished are since the step began.

    queue_us: from ready to start, behind other messages. `stages_us` cuts the time from there to finish into STAGES.
    """

    buckets: tuple[int, ...]
    label: str
    nbytes: int
    ready_us: float
    queue_us: float
    finished_us: float
    stages_us: dict[str, float]


@dataclass(frozen=True)
class Analysis:
    """What a timeline shows; of the steps recorded only those that `comparable` names are compared.

    last_exposed_us: communication after the last gradient of all ranks, the part that no faster rank would shorten.
    """

    first_step: int
    last_step: int
    compared_steps: int
    recorded_steps: int
    mean: StepTimes
    last_exposed_us: float
    ranks: tuple[RankTimes, ...]
    buckets: tuple[BucketTimes, ...]
    messages: tuple[MessageTimes, ...]
    stragglers: tuple[Straggler, ...]
