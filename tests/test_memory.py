# SPDX-License-Identifier: Apache-2.0
"""Memory by the formulas in the presets' docstrings: counted on the CPU, and beside stock DDP's on a GPU."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from bench.gpu_memory import start_counting
from commopt.feedback import SAMPLE_EVERY_STEPS, parameter_buckets
from commopt.feedback.scratch import Scratch
from commopt.hooks.presets import LOCAL_PRESETS, build_preset
from commopt.kernels.finite import all_finite
from commopt.schedule.reducer import rebuild
from tests.gpu_training import ON_GPU, on_ranks
from tests.hook_training import BUCKETS_CAN_BE_GIVEN
from tests.live_memory import LiveMemory
from tests.ranks import Nodes, run

WIDTH, LAYERS, STEPS = 640, 8, 5
BUCKET: dict[str, Any] = {"bucket_cap_mb": 2.5, "gradient_as_bucket_view": True}  # two layers each
# What the CPU's reference kernels, or cuBLAS on the lane's stream, hold at a time for any length of message.
WORK_NBYTES = {"cpu": 2 * 2**20, "cuda": 40 * 2**20}
SMALL_NBYTES = 256 * 2**10
WIDTH_ON_GPU = 3072
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)
CASES = [*(name for name in commopt.PRESETS if name != "auto"), "diloco:period=2", "onebit_local:period=2"]
ROUNDS = ("diloco", "onebit_local")


class Needed(NamedTuple):
    """Bytes that a rank needed for one preset.

    peaks: the most in each step.
    kept: after the last one; by_kind: what stats() says of that.
    largest: elements of the largest bucket of the last steps.
    """

    peaks: list[int]
    kept: int
    by_kind: dict[str, int]
    largest: int


def model_of(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def formulas_of(text: str) -> list[str]:
    """The formulas in the docstring of a preset: of its defaults first, in bytes."""
    preset = (commopt.PRESETS | LOCAL_PRESETS)[text.partition(":")[0]]
    sentence = re.search(r"^Memory beside DDP's: .*$", preset.__doc__ or "", re.MULTILINE)
    assert sentence, f"{preset} does not say what memory it needs"
    return re.findall("`(.+?)`", sentence[0])


def bytes_by(formula: str, n: int, m: int, nodes: tuple[int, ...]) -> int:
    names = {"n": n, "m": m, "N": len(nodes), "L": nodes[0], "P": sum(nodes)}
    return int(eval(formula, {"__builtins__": {}}, names))


def train(rank: int, world_size: int, text: str, options: dict[str, Any], scaled: bool, lr: float = 1e-3) -> Needed:
    """Count the memory of a training in which every element has a gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    ddp = TorchDDP(model_of(), **BUCKET)
    comm = commopt.attach(ddp, build_preset(text, **options), scaler=scaler)
    directions = comm.aggregator is not None and comm.aggregator.adam is not None
    parameters = ddp.parameters()
    optimizer = comm.optimizer(parameters, lr=lr) if directions else torch.optim.SGD(parameters, lr=lr)
    peaks = []
    with LiveMemory() as live:
        for step in range(STEPS):
            live.peak_nbytes = live.now_nbytes
            optimizer.zero_grad()
            torch.manual_seed(100 * step + rank)
            loss = ddp(torch.randn(8, WIDTH)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            peaks.append(live.peak_nbytes)
        kept, by_kind = live.now_nbytes, comm.stats()["memory"]
    largest = max(sum(piece.numel for piece in layout.pieces) for layout in comm._registration.store.buffers)
    comm.close()
    return Needed(peaks, kept, by_kind, largest)


def assert_by_formula(
    needed: Needed, formula: str, nodes: tuple[int, ...], also: int = 0, width: int = WIDTH, device: str = "cpu"
) -> None:
    """Assert that no step needed more than the formula says; also: bytes beside it."""
    n = LAYERS * (width * width + width)
    for step, peak in enumerate(needed.peaks):
        most = bytes_by(formula, n, needed.largest if step else n, nodes) + also + WORK_NBYTES[device]
        if step == 1:  # residuals move to new buckets, and are there twice
            most += bytes_by(formula, n, 0, nodes)
        assert peak <= most, f"step {step}: {peak / 2**20:.1f} MiB, {formula} are {most / 2**20:.1f}"


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2)], ids=["2x1", "2x2"])
@pytest.mark.parametrize("text", CASES)
def test_no_preset_needs_more_than_its_docstring_says(text: str, nodes: tuple[int, ...]) -> None:
    formulas = formulas_of(text)
    over_gloo = "powersgd" in text and len(formulas) > 1
    for needed in run(train, sum(nodes), text, {}, False, nodes=nodes):
        if text.startswith(ROUNDS):  # the parameters are one message
            needed = needed._replace(largest=NUMEL)
        assert_by_formula(needed, formulas[over_gloo], nodes)


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2)], ids=["2x1", "2x2"])
def test_directions_of_adam_need_no_more_than_the_docstring_says(nodes: tuple[int, ...]) -> None:
    for needed in run(train, sum(nodes), "hierarchical_onebit", {"adam": True}, False, nodes=nodes):
        assert_by_formula(needed, formulas_of("hierarchical_onebit")[1], nodes)


@pytest.mark.parametrize("text", ["hierarchical_quantized", "hierarchical_powersgd"])
def test_a_loss_scale_takes_the_residuals_twice_and_nothing_else(text: str) -> None:
    for needed in run(train, 2, text, {}, True, nodes=(1, 1)):
        assert_by_formula(needed, formulas_of(text)[-1 if "powersgd" in text else 0], (1, 1), also=4 * NUMEL)


@pytest.mark.parametrize(
    "text", ["hierarchical_bf16", "onebit", "hierarchical_powersgd", "hierarchical_onebit:adam=True"]
)
def test_stats_say_what_is_kept(text: str) -> None:
    for needed in run(train, 4, text, {}, False, nodes=(2, 2)):
        said = sum(needed.by_kind.values())
        assert abs(needed.kept - said) <= SMALL_NBYTES, f"{needed.kept} are kept, and stats() say {needed.by_kind}"


ROWS, USED_ROWS, COLS = 6000, 1000, 256


def train_in_small_messages(rank: int, world_size: int, name: str, offload: bool) -> Needed:
    """Train with rounds whose messages are of one layer each, by steps so long that every element moves."""
    with patch.object(parameter_buckets, "BUCKET_NBYTES", 4 * NUMEL // LAYERS):
        return train(rank, world_size, name, {"period": 2, "offload": offload}, False, lr=10.0)


@pytest.mark.parametrize("nodes", [(1, 1), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ROUNDS)
def test_what_is_offloaded_takes_host_memory_in_place_of_the_devices(name: str, nodes: tuple[int, ...]) -> None:
    """On a CPU host memory is counted too, and subtracted here."""
    formulas, ranks = formulas_of(name), sum(nodes)
    for offload in (True, False):
        for needed in run(train_in_small_messages, ranks, name, offload, nodes=nodes):
            host = needed.by_kind["offloaded"] if offload else 0
            kept = needed.by_kind["averages"] + needed.by_kind["residuals"]
            assert (kept, host > 0) == (0, True) if offload else kept > 0
            with_m = bytes_by(formulas[1 if offload else 0], NUMEL, NUMEL // LAYERS, nodes)
            assert max(needed.peaks[2:]) - host <= with_m + WORK_NBYTES["cpu"]
            without_n = bytes_by(formulas[1], 0, NUMEL // LAYERS, nodes) + SMALL_NBYTES
            assert (needed.kept - host <= without_n) == offload, "what lasts is of one message, or of the model"
            held = bytes_by("8 * n / L + (N > 2) * 4 * n / P", NUMEL, 0, nodes)
            assert host <= held + SMALL_NBYTES


def train_embedding(rank: int, world_size: int, text: str) -> Needed:
    """Train an embedding most rows of which no rank uses."""
    torch.manual_seed(3)
    ddp = TorchDDP(nn.Embedding(ROWS, COLS))
    comm = commopt.attach(ddp, build_preset(text))
    optimizer, peaks = torch.optim.SGD(ddp.parameters(), lr=1e-3), []
    with LiveMemory() as live:
        for _ in range(STEPS):
            live.peak_nbytes = live.now_nbytes
            optimizer.zero_grad()
            ddp(torch.arange(USED_ROWS)).square().sum().backward()
            optimizer.step()
            peaks.append(live.peak_nbytes)
        kept, by_kind = live.now_nbytes, comm.stats()["memory"]
    comm.close()
    return Needed(peaks, kept, by_kind, ROWS * COLS)


def test_elements_that_nobody_uses_take_five_bytes() -> None:
    unused = (ROWS - USED_ROWS) * COLS
    for needed in run(train_embedding, 2, "onebit", nodes=(1, 1)):
        assert needed.by_kind["masks"] == 5 * unused
        assert abs(needed.kept - sum(needed.by_kind.values())) <= SMALL_NBYTES
        most = bytes_by(formulas_of("onebit")[0], ROWS * COLS, ROWS * COLS, (1, 1)) + 5 * unused + WORK_NBYTES["cpu"]
        assert max(needed.peaks) <= most, (needed, most)


def buckets_alive(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return the bytes and the number of DDP's buckets after each step; a plan changes them before the third."""
    ddp = TorchDDP(model_of(64), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
    seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        storage = bucket.buffer().untyped_storage()
        seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, lambda state, bucket: note(bucket))
    found = []
    for step in range(5):
        ddp.zero_grad()
        if step == 3:
            parameters = list(ddp.parameters())
            rebuild(ddp, [parameters[10:], parameters[:10]])
        ddp(torch.ones(2, 64)).sum().backward()
        alive = [nbytes for memory, nbytes in seen.values() if not memory.expired()]
        found.append((sum(alive), len(alive)))
    return found


@pytest.mark.skipif(not BUCKETS_CAN_BE_GIVEN, reason="torch cannot make DDP's buckets anew")
def test_the_buckets_of_a_plan_take_the_place_of_ddps_own() -> None:
    for found in run(buckets_alive, 2):
        assert {nbytes for nbytes, _ in found} == {4 * LAYERS * (64 * 64 + 64)}
        assert found[2][1] != found[3][1] == found[4][1] == 2


# ------------------------------------------------------------------------------------------------ scratch memory


CPU = torch.device("cpu")


def taken(scratch: Scratch, tag: str, nbytes: int, **options: bool) -> tuple[int, int]:
    """Return where memory begins and ends that is taken and filled."""
    memory = scratch.take(tag, nbytes, torch.uint8, CPU, **options).fill_(7)
    return memory.data_ptr(), memory.data_ptr() + nbytes


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def test_what_is_in_use_at_the_same_time_shares_no_memory_and_all_else_does() -> None:
    scratch = Scratch()
    for bucket in range(3):
        outer, lasting = taken(scratch, "outer", 1000), []
        frames = []
        for number in range(2):
            with scratch.frame():
                inner = taken(scratch, f"inner {number}", 5000)
                again = taken(scratch, f"inner {number}", 4000)
                other = taken(scratch, "other", 3000)
                lasting.append(taken(scratch, f"lasting {number}", 2000, lasting=True))
            assert again[0] == inner[0]
            assert not any(overlap(inner, each) for each in (outer, other, *lasting))
            frames.append(inner)
        assert not overlap(*lasting)
        assert bucket == 0 or overlap(*frames)
        behind = taken(scratch, "behind", 8000)
        assert not any(overlap(behind, each) for each in (outer, *lasting))
        scratch.end_bucket()
    scratch.end_step()
    aligned = [-(-nbytes // 512) * 512 for nbytes in (1000, 5000, 3000, 2000, 2000)]
    taken(scratch, "anything", 1)
    taken(scratch, "anything", 1, lasting=True)
    assert scratch.nbytes == sum(aligned)


def test_a_tensor_outlives_the_memory_that_is_made_anew() -> None:
    scratch = Scratch()
    kept = scratch.take("graph", 1000, torch.uint8, CPU).fill_(1)
    scratch.end_bucket()
    scratch.clear()
    assert scratch.nbytes == 0
    taken(scratch, "graph", 5000)
    assert kept.eq(1).all()


def test_memory_that_no_recent_step_has_needed_is_freed() -> None:
    scratch = Scratch()
    sizes = [8192, 512, *[1024] * 64]
    found = []
    for size in sizes:
        taken(scratch, "message", size)
        scratch.end_bucket()
        scratch.end_step()
        found.append(scratch.nbytes)
    assert found[: 2 * SAMPLE_EVERY_STEPS] == [8192] * 2 * SAMPLE_EVERY_STEPS  # graphs of CUDA work with this memory
    taken(scratch, "message", 1024)
    assert scratch.nbytes == 1024


@pytest.mark.parametrize("place", [0, 1000, 4999])
@pytest.mark.parametrize(
    ("value", "dtype", "finite"),
    [
        (1.0, None, True),
        (float("nan"), None, False),
        (float("inf"), None, False),
        (float("-inf"), None, False),
        (65519.0, torch.float16, True),  # rounds down
        (65520.0, torch.float16, False),
        (-65520.0, torch.float16, False),
        (65520.0, torch.bfloat16, True),
    ],
)
def test_one_value_that_is_not_finite_or_rounds_to_none_is_found(
    place: int, value: float, dtype: torch.dtype | None, finite: bool
) -> None:
    values = torch.linspace(-3, 3, 5000)
    values[place] = value
    assert bool(all_finite(values, dtype)) is finite
    assert bool(values.to(dtype or values.dtype).isfinite().all()) is finite
    assert all_finite(values[:0])


# ------------------------------------------------------------------------------------------------ on a GPU


STEPS_ON_GPU = 8  # with buckets that are replayed among them


def most_allocated(rank: int, world_size: int, device: str, text: str | None) -> tuple[list[int], int]:
    """Return the most memory in each step of a training, and the elements of its largest bucket."""
    before = start_counting(torch.device(device))
    assert before is not None
    ddp = TorchDDP(model_of(WIDTH_ON_GPU).to(device), bucket_cap_mb=60, gradient_as_bucket_view=True)
    comm = None if text is None else commopt.attach(ddp, build_preset(text))
    optimizer, peaks = torch.optim.SGD(ddp.parameters(), lr=1e-3), []
    for step in range(STEPS_ON_GPU):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        ddp(torch.randn(8, WIDTH_ON_GPU, device=device)).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    largest = 0
    if comm is not None:
        largest = max(layout.numel for layout in comm._registration.store.buffers)
        comm.close()
    return peaks, largest


def beside_stock(rank: int, world_size: int, device: str, texts: list[str]) -> dict[str, tuple[list[int], int]]:
    """Return, by preset, how much more than stock DDP each step needs, and the elements of the largest bucket."""
    most_allocated(rank, world_size, device, None)  # libraries of CUDA take memory the first time
    found, stock = {}, most_allocated(rank, world_size, device, None)[0]
    for text in texts:
        peaks, largest = most_allocated(rank, world_size, device, text)
        found[text] = [mine - theirs for mine, theirs in zip(peaks, stock, strict=True)], largest
    return found


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("nodes", [(1, 1), (2, 2)], ids=["2x1", "2x2"])
def test_no_preset_needs_more_beside_stock_ddp_than_its_docstring_says(device: str, nodes: Nodes) -> None:
    shape: Any = nodes
    texts = [text for text in CASES if not text.startswith(ROUNDS)]
    too_much = set()
    for found in on_ranks(device, beside_stock, sum(shape), texts, nodes=nodes, timeout_s=150.0):
        for text, (peaks, largest) in found.items():
            needed, formula = Needed(peaks, 0, {}, largest), formulas_of(text)[0]
            try:
                assert_by_formula(needed, formula, shape, width=WIDTH_ON_GPU, device=device)
            except AssertionError as error:
                too_much.add(f"{text}: {error}; all steps: {[round(peak / 2**20) for peak in peaks]}")
    assert not too_much, "\n".join(sorted(too_much))
