"""Hierarchical in chunks: the same averages, nothing lost, in one lane or two, and two levels really work at once."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commopt import (
    DGC,
    Account,
    Aggregator,
    Cast,
    Communicator,
    Compressed,
    ConfigurationError,
    Feedback,
    Flat,
    Hierarchical,
    Layout,
    OneBit,
    PowerSGD,
    Quantize,
    WireBytes,
    recording,
)
from commopt.aggregate.chunks import MIN_CHUNK_NBYTES, cut
from commopt.aggregate.hierarchical import Form
from commopt.groups import Team, TeamShape, join
from commopt.lanes import lanes_available, lanes_here
from tests.catalogue import LAYOUTS, Mean, assert_average
from tests.feedback_training import STRATEGIES, Training, assert_conserved, assert_something_left
from tests.pipelining import LAYOUT, Books, Run, assert_balanced, lane_threads, short_chunks
from tests.ranks import run
from tests.test_failures import CAUSE, Failing, Seen, assert_all_know, watch
from tests.test_wire_bytes import counting

LAYER = {"weight": (128, 128), "bias": (128,)}
FOUR = Compressed(Quantize(4, 64))
ROUNDED = Compressed(Quantize(8, 64, rounding="stochastic"), Feedback(dtype=torch.bfloat16))
KINDS: dict[str, Hierarchical] = {
    "4 bits": Hierarchical(FOUR),
    "4 bits, leader": Hierarchical(FOUR, form="leader"),
    "4 bits, intra 8 bits": Hierarchical(FOUR, Compressed(Quantize(8, 64))),
    "one bit, intra 8 bits": Hierarchical(Compressed(OneBit(64)), Compressed(Quantize(8, 64))),
    "stochastic, 16-bit residuals": Hierarchical(ROUNDED, ROUNDED),
    "exact, intra 8 bits": Hierarchical(Flat(), Compressed(Quantize(8, 64))),
    "top 5%": Hierarchical(Compressed(DGC(0.05))),
    "momentum": Hierarchical(Compressed(DGC(0.05, momentum=0.9))),
    "rank 2": Hierarchical(PowerSGD(2, start_step=0)),
    "rank 1 alternating, leader": Hierarchical(PowerSGD(1, start_step=0, alternating=True), form="leader"),
    "rank 2, intra 8 bits": Hierarchical(PowerSGD(2, start_step=0), Compressed(Quantize(8, 64))),
}

# ------------------------------------------------------------------------------------------ pure


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("numel", [0, 1, 16_383, 32_768, 100_001, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunks_are_the_buffer(chunks: int, numel: int, dtype: torch.dtype) -> None:
    layout = Layout.anonymous(numel)
    parts = cut(layout, dtype, chunks, 8, between_pieces=False)
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == numel
    assert sum(part.layout.numel for part in parts) == numel
    assert len(parts) <= max(min(chunks, numel * dtype.itemsize // MIN_CHUNK_NBYTES), 1)
    if len(parts) > 1:
        lengths = [part.end - part.begin for part in parts]
        assert min(lengths) * dtype.itemsize >= MIN_CHUNK_NBYTES
        assert max(lengths) - min(lengths) <= 2 * 512 * 8 + 1
        assert all(part.begin % (512 * 8) == 0 for part in parts), "shards need padding"
    if numel == 1_000_000 and dtype == torch.float32:
        assert len(parts) == chunks


def test_the_last_chunk_is_not_too_short_either() -> None:
    # Half of it, rounded to whole blocks on 64 ranks, would leave 7232 elements, 28 KiB.
    assert len(cut(Layout.anonymous(40_000), torch.float32, 2, 64, between_pieces=False)) == 1


def test_parameters_may_stay_whole() -> None:
    layout = Layout.of_parameters([("large", 100_000), ("a", 30_000), ("b", 30_000), ("c", 10), ("d", 30_000)])
    parts = cut(layout, torch.float32, 4, 2, between_pieces=True)
    assert [sorted(part.layout.names) for part in parts] == [["large"], ["a"], ["b", "c", "d"]]
    assert len(cut(Layout.of_parameters([("one", 10**6)]), torch.float32, 4, 2, between_pieces=True)) == 1


@pytest.mark.parametrize("nodes", [(2, 2), (2, 1), (4, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_send_what_the_whole_would(nodes: tuple[int, ...], dtype: torch.dtype) -> None:
    layout = Layout.of_parameters([(f"{name}.{layer}", shape) for layer in range(8) for name, shape in LAYER.items()])
    # In chunks more matrices are cut by rows, and each block has a right factor of its own: here are left ones alone.
    for inter in (Flat(), FOUR, PowerSGD(2, start_step=0, alternating=True)):
        for rank in range(sum(nodes)):
            shape = TeamShape.of(nodes, rank)
            whole, cut = (Hierarchical(inter, chunks=chunks).wire_bytes(layout, dtype, shape) for chunks in (1, 4))
            assert cut.inter == pytest.approx(whole.inter, rel=0.01, abs=200), inter
            assert cut.intra == pytest.approx(whole.intra, rel=0.05, abs=200), inter
            assert len(Hierarchical(inter, chunks=4).calls(layout, dtype, shape)) > len(
                Hierarchical(inter).calls(layout, dtype, shape)
            )


def test_chunks_throw_dice_of_their_own() -> None:
    whole = Account(LAYOUT)
    dice = [account.dice("worker", 0) for account in (whole, whole.of_chunk(1, LAYOUT), whole.of_chunk(2, LAYOUT))]
    assert len({str(each) for each in dice}) == 3


@pytest.mark.parametrize("chunks", [0, -1, 1.0, True, "2", None])
def test_chunks_must_be_a_number(chunks: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number, 1 or more"):
        Hierarchical(chunks=chunks)


def test_only_what_is_unusual_is_shown() -> None:
    assert repr(Hierarchical()) == repr(Hierarchical(chunks=1))
    assert "chunks=3" in repr(Hierarchical(chunks=3))


@pytest.mark.parametrize(
    ("backend", "nccl", "cuda", "asked", "lanes"),
    [
        ("gloo", (), (), "0", 2),
        ("mpi", (2, 28), (13, 0), "1", 1),
        ("nccl", (2, 26), (12, 3), "1", 2),
        ("nccl", (2, 28, 9), (13, 0), "1", 2),
        ("nccl", (2, 28, 9), (13, 0), "0", 1),
        ("nccl", (2, 28, 9), (13, 0), "", 1),
        ("nccl", (2, 25, 1), (13, 0), "1", 1),
        ("nccl", (2, 26, 2), (12, 2), "1", 1),
        ("nccl", (), (), "1", 1),
    ],
)
def test_where_two_lanes_are_safe(
    backend: str, nccl: tuple[int, ...], cuda: tuple[int, ...], asked: str, lanes: int
) -> None:
    assert lanes_available(backend, nccl, cuda, {"NCCL_LAUNCH_ORDER_IMPLICIT": asked}) == lanes


def test_this_process_is_asked_when_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commopt.lanes.available._versions", lambda: ((2, 28), (13, 0)))
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    assert lanes_here("nccl") == 2
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    assert (lanes_here("nccl"), lanes_here("gloo")) == (1, 2)


# -------------------------------------------------------------------------------------- averages


def average(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Average buffers of all sizes; return hashes with two lanes, and with one lane on every other rank."""
    comm = Communicator()
    uneven = not join().cluster.uniform
    cases: list[tuple[Aggregator, Form | None, int]] = [
        (Flat(), None, 2),
        (Flat(), "leader", 5),
        (Flat(), "reduce_scatter", 3),
        (Flat(), "all_reduce", 2),
        (Compressed(Cast(torch.bfloat16)), None, 3),
    ]
    made = [
        Hierarchical(inter, form=form, chunks=chunks)
        for inter, form, chunks in cases
        if not uneven or form in (None, "leader")
    ]
    hashes: tuple[list[str], list[str]] = ([], [])
    for aggregator in made:
        for dtype in (torch.float32, torch.bfloat16):
            for numel in (0, 1, 2, 700, 1023, 4099, 12_288):
                inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
                mean = Mean.of([values.to(dtype) for values in inputs])
                for one_lane, found in zip((False, rank % 2 == 1), hashes, strict=True):
                    buffer = inputs[rank].to(dtype, copy=True)
                    with short_chunks(one_lane):
                        comm.all_reduce(buffer, aggregator=aggregator)
                    assert_average(buffer, mean, aggregator, (dtype, numel))
                    found.append(hashlib.sha256(buffer.view(torch.uint8).numpy().tobytes()).hexdigest())
    return hashes


@pytest.mark.parametrize("layout", ["2", "1+1", "2x2", "2+1 interleaved"])
def test_averages(layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    results = run(average, world_size, nodes=nodes)
    for two, mixed in results:
        assert two == results[0][0] == mixed


# ------------------------------------------------------------------------------------- residuals


def keep_books(rank: int, world_size: int, kind: str, dtype: str, per_step: bool, lanes: str) -> tuple[Books, str, str]:
    """Train with numbers of chunks that change, and one poisoned step; return the books, results and all that is kept.

    lanes: "two", "one", or "mixed": one on every other rank.
    """
    training = Run(rank, world_size, getattr(torch, dtype), per_step)
    aggregator = KINDS[kind]
    with short_chunks(lanes == "one" or (lanes == "mixed" and rank % 2 == 1)):
        for chunks in (1, 3, 3, 3, 2, 2, 5, 5, 1, 4):
            training.step(replace(aggregator, chunks=chunks))
        for element in (0, LAYOUT.numel // 2, LAYOUT.numel - 1):
            before = training.state()
            got = training.step(replace(aggregator, chunks=4), poison=(element % world_size, element))
            assert not got.isfinite().all()
            assert training.state() == before, "a step that was not finite left something behind"
        in_chunks = replace(aggregator, chunks=4)
        promised = in_chunks.wire_bytes(LAYOUT, training.dtype, training.membership.team, step=13)
        with counting() as sent:
            training.step(in_chunks)
        assert sum(sent, WireBytes()) == promised
    return training.books(), training.digest(), training.state()


@pytest.mark.parametrize(
    ("kind", "layout", "dtype", "per_step", "other_lanes"),
    [
        ("4 bits", "3x2", "bfloat16", True, "mixed"),
        ("4 bits, leader", "2+1", "bfloat16", False, None),
        ("one bit, intra 8 bits", "2x2", "float32", True, None),
        ("stochastic, 16-bit residuals", "2x2", "float32", False, "one"),
        ("exact, intra 8 bits", "2x2", "float32", False, None),
        ("top 5%", "2+1", "float32", True, "mixed"),
        ("momentum", "2x2", "float32", False, None),
        ("rank 2", "2x2", "bfloat16", True, None),
        ("rank 1 alternating, leader", "2+1", "float32", False, None),
        ("rank 2, intra 8 bits", "2x2", "float32", False, "one"),
    ],
)
def test_nothing_is_lost_in_any_number_of_chunks(
    kind: str, layout: str, dtype: str, per_step: bool, other_lanes: str | None
) -> None:
    world_size, nodes = LAYOUTS[layout]
    results = run(keep_books, world_size, kind, dtype, per_step, "two", nodes=nodes)
    assert len({digest for _, digest, _ in results}) == 1, "replicas differ"
    if other_lanes is not None:
        others = run(keep_books, world_size, kind, dtype, per_step, other_lanes, nodes=nodes)
        assert [result[1:] for result in others] == [result[1:] for result in results], "lanes change bits"
    if "16-bit" not in kind and kind != "momentum":  # roundings that are right on average only; owed to nobody
        assert_balanced([books for books, *_ in results])


def drain(rank: int, world_size: int, kind: str) -> list[tuple[float, float]]:
    """Return how much is kept after each change of the number of chunks, and after a while without gradients."""
    training, found = Run(rank, world_size), []
    with short_chunks():
        for before, after in ((1, 3), (3, 2), (2, 1)):
            training.step(replace(KINDS[kind], chunks=before))
            training.step(replace(KINDS[kind], chunks=before))
            kept = float(training.kept().abs().max())
            for _ in range(14):
                training.step(replace(KINDS[kind], chunks=after), factor=0.0)
            found.append((kept, float(training.kept().abs().max())))
    return found


def test_no_residual_stays_where_nobody_sends_it() -> None:
    for found in run(drain, 4, "4 bits, intra 8 bits", nodes=(2, 2)):
        for before, after in found:
            assert before > 0.05
            assert after < 1e-4 * before


def train(rank: int, world_size: int, strategy: str) -> tuple[Any, str]:
    with short_chunks():
        aggregator = STRATEGIES[strategy]
        assert isinstance(aggregator, Hierarchical)
        training = Training(rank, world_size, replace(aggregator, chunks=3))
        for _ in range(6):
            training.step()
        return training.books(), training.digest()


def test_in_training() -> None:
    results = run(train, 4, "inter 4 bits, intra 8 bits", nodes=(2, 2))
    assert len({digest for _, digest in results}) == 1
    assert_conserved([books for books, _ in results])
    assert_something_left([books for books, _ in results])


# --------------------------------------------------------------------------------------- overlap


@dataclass(frozen=True)
class Slow(Aggregator):
    """Takes its time across, and notes when."""

    seconds: float
    seen: ClassVar[list[tuple[str, float, float]]] = []  # of this process
    messages: ClassVar[list[object]] = []

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, account: Account) -> None:
        begin = time.monotonic()
        time.sleep(self.seconds)
        team.all_reduce(buffer)
        Slow.messages.append(recording.current())
        Slow.seen.append(("across", begin, time.monotonic()))

    def calls(self, *arguments: Any, **named: Any) -> tuple[()]:
        return ()

    @property
    def lossless(self) -> bool:
        return True


def overlap(rank: int, world_size: int) -> list[tuple[float, list[str], list[str]]]:
    """Use one lane, then two; return what `share` does."""
    return [share(rank, world_size, one_lane) for one_lane in (True, False)]


def share(rank: int, world_size: int, one_lane: bool) -> tuple[float, list[str], list[str]]:
    """Return for how long both levels were at work at once, and the lanes' threads in the beginning and in the end."""
    Slow.seen.clear()
    Slow.messages.clear()
    original = Team.reduce

    def noted(team: Team, tensor: Tensor, dst: int) -> None:
        begin = time.monotonic()
        original(team, tensor, dst)
        time.sleep(0.02)
        Slow.seen.append(("up", begin, time.monotonic()))

    training = Run(rank, world_size)
    aggregator = Hierarchical(Slow(0.02), form="leader", chunks=4)
    recorder = recording.Recorder()
    recorder.enabled = True
    recorder.begin_step(0, torch.device("cpu"))
    message = recorder.message([0], "test", 4 * LAYOUT.numel)
    with short_chunks(one_lane), patch.object(Team, "reduce", noted):
        training.step(_Recorded(aggregator, message))
        before = lane_threads()
        for _ in range(5):
            training.step(aggregator)
    across, up = ([span[1:] for span in Slow.seen if span[0] == name] for name in ("across", "up"))
    if training.membership.team.inter is not None and rank in (0, 2):
        assert len(across) == 24
        assert Slow.messages[:4] == [message] * 4, "the second thread works for nobody"
        assert Slow.messages[4:] == [None] * 20
    shared = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in across for b in up)
    return shared, before, lane_threads()


@dataclass(frozen=True)
class _Recorded(Aggregator):
    """Works for a message, as the lane of a hook does."""

    inner: Aggregator
    message: Any = field(compare=False)

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, account: Account) -> None:
        with recording.running(self.message):
            self.inner.all_reduce(buffer, team, scale, account)

    def calls(self, *arguments: Any, **named: Any) -> tuple[()]:
        return ()

    @property
    def lossless(self) -> bool:
        return True


@pytest.mark.alone
def test_two_levels_work_at_once() -> None:
    for rank, (one, two) in enumerate(run(overlap, 4, nodes=(2, 2))):
        assert one == (0, ["commopt-lane"], ["commopt-lane"])
        if rank % 2:  # does not lead, hence has no way across
            assert two == one
        else:
            shared, before, after = two
            assert shared > 0.1, "three chunks of each step go up while another goes across, for up to 20 ms each"
            assert before == after == ["commopt-lane", "commopt-second-lane"]


# -------------------------------------------------------------------------------------- failures


def fail_across(rank: int, world_size: int, folder: str, culprit: int) -> tuple[Seen, list[str]]:
    training = Run(rank, world_size)
    aggregator = Hierarchical(Failing(culprit), form="leader", chunks=4)
    with short_chunks():
        training.step(aggregator)
        Failing.armed = True
        seen = watch(lambda: training.step(aggregator), folder, rank, world_size)
    return seen, threads_in_the_end("commopt-second-lane")


def threads_in_the_end(name: str) -> list[str]:
    """Return which of commopt's threads are left once that one has had time to end."""
    deadline = time.monotonic() + 5
    while name in lane_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    return lane_threads()


def test_a_failure_across_is_everybodys(tmp_path: Path) -> None:
    results = run(fail_across, 4, str(tmp_path), 2, nodes=(2, 2), fresh=True)
    assert_all_know([seen for seen, _ in results], 2)
    assert all("commopt-second-lane" not in threads for _, threads in results)


def fail_inside(rank: int, world_size: int, folder: str, culprit: int) -> tuple[Seen, list[str]]:
    """Fail in a later chunk on the first lane, while the second is at work."""
    training = Run(rank, world_size)
    aggregator = Hierarchical(Slow(0.05), form="reduce_scatter", chunks=4)
    original = Team.reduce_scatter
    calls = []

    def failing(team: Team, output: Tensor, source: Tensor) -> None:
        if team is training.membership.team.intra:
            calls.append(output)
            if dist.get_rank() == culprit and len(calls) == 4 + 3:
                raise OSError(CAUSE)
        original(team, output, source)

    with short_chunks(), patch.object(Team, "reduce_scatter", failing):
        training.step(aggregator)
        seen = watch(lambda: training.step(aggregator), folder, rank, world_size)
    return seen, threads_in_the_end("commopt-second-lane")


def test_a_failure_inside_leaves_nobody_across(tmp_path: Path) -> None:
    results = run(fail_inside, 4, str(tmp_path), 3, nodes=(2, 2), fresh=True)
    assert_all_know([seen for seen, _ in results], 3)
    assert all("commopt-second-lane" not in threads for _, threads in results)
