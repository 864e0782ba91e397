# SPDX-License-Identifier: Apache-2.0
"""Replicas that differ in silence are found, named and bounded; ordinary trainings raise no alarm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import ConfigurationError, HookState, MismatchError
from commopt.attached.checksum import checksum
from commopt.attached.divergence import Split
from commopt.attached.options import AttachOptions
from commopt.hooks.presets import LOCAL_PRESETS, build_preset
from tests.feedback_training import Records
from tests.ranks import run
from tests.sharded_training import Made, batch, over_all_ranks

CPU = torch.device("cpu")
WIDTH = 64
EVERY = 3
ODD = 2  # the rank that deviates
FAULT_AT = 4  # before this step's forward


class Model(nn.Module):
    """A frozen layer, a normalisation with statistics, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(x)) * self.mask
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def flip_a_bit(model: Any, optimizer: Any) -> None:
    model.layers[1].weight.data.view(torch.int32)[5, 7] ^= 1  # the last of the mantissa


def flip_a_sign(model: Any, optimizer: Any) -> None:
    model.layers[1].weight.data.view(torch.int32)[5, 7] ^= -(2**31)


def add_noise(model: Any, optimizer: Any) -> None:
    """Dropout in the wrong place: on the weights themselves, in memory, by each rank's own random numbers."""
    with torch.no_grad():
        model.layers[2].weight.copy_(nn.functional.dropout(model.layers[2].weight, 0.01))


def unfreeze(model: Any, optimizer: Any) -> None:
    """DDP knows no gradient of what was frozen when it was made, so that of this rank is its own."""
    model.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.frozen.parameters())})


def change_the_mask(model: Any, optimizer: Any) -> None:
    model.mask[3] = 0.0


FAULTS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "a flipped bit": (flip_a_bit, "layers.1.weight"),
    "a flipped sign": (flip_a_sign, "layers.1.weight"),
    "noise on the parameters": (add_noise, "layers.2.weight"),
    "a layer unfrozen": (unfreeze, "frozen.weight"),
}


Step = Callable[[int], None]


def step_of(
    rank: int, fault: Callable[[Any, Any], None] | None = None, ignored: Sequence[str] = (), **options: Any
) -> tuple[TorchDDP, Step]:
    """Return a DDP model and a function that trains it for one step: each rank with its own batches."""
    torch.manual_seed(3)
    model = Model()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = TorchDDP(model, **options)
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], 0.05, momentum=0.9)

    def train(step: int) -> None:
        if fault is not None and step == FAULT_AT and rank == ODD:
            torch.manual_seed(99)
            fault(ddp.module, optimizer)
        values = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        ddp(values).square().mean().backward()
        optimizer.step()

    return ddp, train


def bits(tensors: Iterable[Tensor]) -> list[int]:
    return [int(checksum([each.detach()], CPU)) for each in tensors]


@contextmanager
def warned() -> Iterator[list[str]]:
    records, logger = Records(), logging.getLogger("commopt")
    logger.addHandler(records)
    try:
        yield records.messages
    finally:
        logger.removeHandler(records)


# ------------------------------------------------------------------------------------- faults


def in_stock_ddp(rank: int, world_size: int, name: str) -> list[int]:
    ddp, train = step_of(rank, FAULTS[name][0])
    for step in range(12):
        train(step)
    return bits(ddp.module.parameters())


@pytest.mark.parametrize("name", FAULTS)
def test_stock_ddp_says_nothing(name: str) -> None:
    first, second, odd = run(in_stock_ddp, 3, name)
    assert first == second != odd


def found_by(rank: int, world_size: int, name: str, preset: str, registered: bool = False) -> tuple[int, str]:
    ddp, train = step_of(rank, FAULTS[name][0])
    options: Any = {"check_every": EVERY, "on_divergence": "raise"}
    if registered:  # as torch's own DDP does it
        ddp.register_comm_hook(HookState(module=ddp.module, **options), commopt.PRESETS[preset])
    else:
        commopt.attach(ddp, preset, **options)
    for step in range(20):
        try:
            train(step)
        except MismatchError as error:
            return step, str(error)
    raise AssertionError("nothing was found in 20 steps")


@pytest.mark.parametrize("registered", [False, True], ids=["attached", "registered"])
@pytest.mark.parametrize("preset", ["flat", "hierarchical_quantized"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_deviating_rank_is_named_on_all_within_n_steps(name: str, preset: str, registered: bool) -> None:
    found = run(found_by, 4, name, preset, registered, nodes=(2, 2))
    ((step, text),) = set(found)
    assert FAULT_AT < step <= FAULT_AT + EVERY
    assert f"rank {ODD} holds other parameters than rank 0, 1, 3" in text
    assert FAULTS[name][1] in text
    assert "it began between step 3 and step 6" in text


def test_of_two_ranks_nobody_knows_which_is_right() -> None:
    ((_, text),) = set(run(found_by, 3, "a flipped bit", "flat"))
    assert "rank 2 holds other parameters than rank 0, 1" in text
    assert Split.of({0: 5, 1: 6}) == Split(((0,), (1,)), (0, 1))
    assert "rank 0 and rank 1 hold different parameters" in Split(((0,), (1,)), (0, 1)).in_words("parameters")


@pytest.mark.parametrize(
    ("held", "groups"),
    [
        ({0: 5, 1: 5, 2: 5}, None),
        ({0: 5, 1: 7, 2: 5}, ((0, 2), (1,))),
        ({0: 7, 1: 5, 2: 5}, ((1, 2), (0,))),
        ({0: 1, 1: 2, 2: 2, 3: 1}, ((0, 3), (1, 2))),
        ({0: 1, 1: 2, 2: 3}, ((0,), (1,), (2,))),
        ({0: 5, 1: 0, 2: 5}, None),  # 1 takes no part
    ],
)
def test_the_largest_group_is_right(held: dict[int, int], groups: tuple[tuple[int, ...], ...] | None) -> None:
    split = Split.of(held)
    assert (None if split is None else split.groups) == groups


def warning_of(rank: int, world_size: int, preset: str) -> tuple[list[str], Any]:
    ddp, train = step_of(rank, flip_a_bit)
    state = commopt.attach(ddp, preset, check_every=EVERY)
    with warned() as messages:
        for step in range(16):
            train(step)
    return [each for each in messages if "replicas differ" in each], state.stats()["replicas_equal_after"]


def test_a_warning_comes_once_on_the_first_rank_and_on_those_that_deviate() -> None:
    found = run(warning_of, 4, "hierarchical", nodes=(2, 2))
    assert [len(messages) for messages, _ in found] == [1, 0, 1, 0]
    assert {equal_after for _, equal_after in found} == {EVERY}


def resynced(rank: int, world_size: int, name: str) -> tuple[list[int], list[int], list[str], Any]:
    ddp, train = step_of(rank, FAULTS[name][0])
    state = commopt.attach(ddp, "hierarchical_quantized", check_every=EVERY, on_divergence="resync")
    before: list[int] = []
    with warned() as messages:
        for step in range(13):
            if step == FAULT_AT + EVERY:
                before = bits(ddp.module.parameters())
            train(step)
    said = [each for each in messages if "replicas differ" in each]
    return before, bits(ddp.module.parameters()), said, state.stats()["replicas_equal_after"]


def test_resync_gives_a_deviating_rank_what_the_others_hold() -> None:
    found = run(resynced, 4, "a flipped bit", nodes=(2, 2))
    assert found[0][0] == found[1][0] == found[3][0] != found[ODD][0]
    assert all(after == found[0][1] for _, after, _, _ in found)
    assert {equal_after for *_, equal_after in found} == {9}
    assert "The state of optimizers stays as it is" in found[ODD][2][0]


def keeps_optimizer(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    ddp, _ = step_of(rank, broadcast_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01, momentum=0.9)
    commopt.attach(ddp, "flat", check_every=1, on_divergence="resync")
    layer = ddp.module.layers[1]
    for step in range(4):
        ddp(torch.full((4, WIDTH), 1.0 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and rank == ODD:
            with torch.no_grad():
                layer.weight += 1.0
            optimizer.state[layer.weight]["momentum_buffer"] += 1.0
    everyone = [torch.zeros_like(layer.weight) for _ in range(world_size)]
    moments = [torch.zeros_like(layer.weight) for _ in range(world_size)]
    means = [torch.zeros_like(ddp.module.norm.running_mean) for _ in range(world_size)]
    dist.all_gather(everyone, layer.weight.detach())
    dist.all_gather(moments, optimizer.state[layer.weight]["momentum_buffer"])
    dist.all_gather(means, ddp.module.norm.running_mean)
    off = float((everyone[ODD] - everyone[0]).abs().max())
    return off < 0.1, torch.equal(moments[ODD], moments[0]), torch.equal(means[0], means[1])


def test_resync_leaves_the_state_of_optimizers_and_ranks_that_were_right() -> None:
    for near, same_moments, same_means in run(keeps_optimizer, 3):
        assert near  # 1.0 without resync; the momentum goes on pulling
        assert not same_moments
        assert not same_means  # statistics of ranks 0 and 1, which had the right parameters


# ------------------------------------------------------------------------------------- buffers


def buffers(rank: int, world_size: int, fault: str, broadcast: bool, ignored: bool) -> list[str]:
    statistics = ("norm.running_mean", "norm.running_var") if ignored else ()
    change = change_the_mask if fault == "mask" else None
    ddp, train = step_of(rank, change, statistics, broadcast_buffers=broadcast)
    commopt.attach(ddp, "flat", check_every=EVERY, on_divergence="raise")
    with warned() as messages:
        for step in range(13):
            train(step)
    return [each for each in messages if "buffers differ" in each]


@pytest.mark.parametrize("fault", ["mask", "statistics"])
def test_buffers_that_nobody_makes_equal_are_warned_of_once(fault: str) -> None:
    found = run(buffers, 3, fault, False, False)
    assert [len(each) for each in found] == [1, 1, 1]
    assert "norm.running_mean" in found[0][0]
    assert "broadcast_buffers=True" in found[0][0]


def test_buffers_that_ddp_broadcasts_or_is_told_to_ignore_are_left_alone() -> None:
    assert run(buffers, 3, "mask", True, False) == [[], [], []]
    assert run(buffers, 3, "statistics", False, True) == [[], [], []]


def odd_buffers(generator: torch.Generator) -> dict[str, Tensor]:
    """Buffers that no bytes can be read of, or not as they lie in memory."""
    rotations = torch.polar(torch.ones(4, 4), torch.randn(4, 4, generator=generator))
    return {
        "inverse": rotations.conj(),
        "sines": rotations.conj().imag,
        "wide": torch.randn(1, 4, generator=generator).expand(3, 4),
        "meta": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.randn(4, generator=generator), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }


def with_odd_buffers(rank: int, world_size: int, action: str, sharded: bool) -> tuple[list[str], Any, list[int]]:
    torch.manual_seed(3)
    module: Any = Made()() if sharded else nn.Linear(WIDTH, WIDTH)
    own = torch.Generator().manual_seed(rank if action == "resync" else 0)
    for name, value in odd_buffers(own).items():
        module.register_buffer(name, value)
    model = module if sharded else TorchDDP(module, broadcast_buffers=False, init_sync=False)
    state = commopt.attach(model, "hierarchical", check_every=1, on_divergence=action)
    with warned() as messages:
        for step in range(4):
            if action == "resync" and step == 1 and rank == 1:
                module.weight.data += 1.0
            values = batch(step) if sharded else torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
            model(values).square().mean().backward()
    compared = [module.inverse.resolve_conj(), module.sines.resolve_neg(), module.wide]
    return messages, state.stats()["replicas_equal_after"], bits(compared)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_buffers_without_plain_bytes_end_no_training(sharded: bool) -> None:
    for messages, equal_after, _ in run(with_odd_buffers, 4, "warn", sharded, nodes=(2, 2), fresh=True):
        assert not [each for each in messages if "differ" in each]
        assert equal_after == 2


@pytest.mark.filterwarnings("ignore")
def test_a_resync_writes_to_views_what_they_are_to_be_read_as() -> None:
    (_, _, first), (messages, _, second) = run(with_odd_buffers, 2, "resync", False, fresh=True)
    assert first == second
    said = "".join(each for each in messages if "buffers differ" in each)
    assert all(repr(name) in said for name in ("inverse", "sines", "wide"))
    assert "(of 3)" in said


# ------------------------------------------------------------------------------------- no false alarm


def ordinary(rank: int, world_size: int, presets: list[str], dtype: str) -> None:
    """Train with every preset, a GradScaler drops two steps, and replicas are compared in each."""
    for name in presets:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(getattr(torch, dtype))
        ddp = TorchDDP(module, bucket_cap_mb=0.012)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        state = commopt.attach(ddp, build_preset(name), check_every=1, scaler=scaler, on_divergence="raise", plan="ddp")
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
        for step in range(10):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + rank)
            values = torch.randn(4, WIDTH, generator=generator).to(getattr(torch, dtype))
            if step in (3, 6) and rank == step % world_size:
                values[0, 0] = torch.inf
            scaler.scale(ddp(values).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert state.stats()["replica_checks"] == 8, name
        assert state.stats()["replicas_equal_after"] == 8, name
        state.close()


ALL = [*commopt.PRESETS, *(f"{name}:period=3" for name in LOCAL_PRESETS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", range(4))
def test_ordinary_training_raises_no_alarm(part: int, dtype: str) -> None:
    run(ordinary, 4, ALL[part::4], dtype, nodes=(2, 2))


def joining(rank: int, world_size: int) -> int:
    ddp, train = step_of(rank, broadcast_buffers=True)
    state = commopt.attach(ddp, "hierarchical", check_every=1, on_divergence="raise")
    with ddp.join():
        for step in range(4 + 2 * rank):
            train(step)
    train(50)
    train(51)
    return int(state.stats()["replica_checks"])


def test_a_rank_without_data_in_join_takes_no_part() -> None:
    assert min(run(joining, 3)) >= 8


# ------------------------------------------------------------------------------------- LocalSGD


def local_sgd(rank: int, world_size: int, fault_on: int | None) -> str:
    ddp, train = step_of(rank)
    commopt.attach(ddp, commopt.LocalSGD(period=4), check_every=1, on_divergence="raise")
    for step in range(10):
        if step == 5 and rank == fault_on:
            flip_a_bit(ddp.module, None)
        try:
            train(step)
        except MismatchError as error:
            return str(error)
    return ""


def test_with_local_sgd_ranks_of_a_node_are_compared() -> None:
    assert run(local_sgd, 4, None, nodes=(2, 2)) == [""] * 4
    found = run(local_sgd, 4, 3, nodes=(2, 2))
    assert all("rank 2 and rank 3 hold different parameters" in text for text in found)
    assert ["layers.1.weight" in text for text in found] == [False, False, True, True]


def nodes_of_one(rank: int, world_size: int, **options: Any) -> str:
    ddp, train = step_of(rank)
    try:
        commopt.attach(ddp, commopt.LocalSGD(period=4), check_every=1, **options)
    except ConfigurationError as error:
        return str(error)
    for step in range(6):
        train(step)
    return ""


def test_between_nodes_of_one_rank_local_sgd_has_nothing_to_compare() -> None:
    assert run(nodes_of_one, 2, nodes=(1, 1)) == ["", ""]
    for text in run(nodes_of_one, 2, nodes=(1, 1), on_divergence="raise"):
        assert text.startswith("attach(on_divergence='raise') has nothing to compare")
        assert text.endswith("leave on_divergence out")


# ------------------------------------------------------------------------------------- FSDP2


def hsdp(rank: int, world_size: int, action: Any, fault: str) -> tuple[int, str, list[int]]:
    net = Made(seed=rank // 2 if fault == "seeds" else 0)()
    commopt.attach(net, "hierarchical_quantized", check_every=EVERY, on_divergence=action)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with warned() as messages:
        for step in range(11):
            if fault == "bit" and step == FAULT_AT and rank == 3:
                weight: Any = net.get_parameter("layers.0.0.weight")
                weight.to_local().data.view(torch.int32)[2, 3] ^= 1
            optimizer.zero_grad()
            try:
                net(batch(step)).square().mean().backward()
            except MismatchError as error:
                return step, str(error), []
            optimizer.step()
    shards = [each.to_local() for each in net.parameters()]  # type: ignore[attr-defined]
    return 0, "".join(each for each in messages if "replicas differ" in each), bits(shards)


def test_replicas_of_a_shard_are_compared_and_all_ranks_raise() -> None:
    found = run(hsdp, 4, "raise", "bit", nodes=(2, 2))
    assert {step for step, *_ in found} == {FAULT_AT + EVERY}
    assert all("rank 1 and rank 3 hold different parameters" in text for _, text, _ in found)
    assert ["layers.0.0.weight" in text for _, text, _ in found] == [False, True, False, True]


def test_replicas_that_begin_with_other_weights_are_found() -> None:
    found = run(hsdp, 4, "raise", "seeds", nodes=(2, 2))
    assert all("no check before found them equal" in text for _, text, _ in found)
    assert all("rank 0 and rank 2 hold" in text and "rank 1 and rank 3 hold" in text for _, text, _ in found)


def test_a_shard_is_resynced() -> None:
    (_, _, first), (_, _, second), (_, _, third), (_, text, fourth) = run(hsdp, 4, "resync", "bit", nodes=(2, 2))
    assert (first, second) == (third, fourth)
    assert "rank 1 and rank 3" in text


def test_replicas_of_shards_raise_no_alarm() -> None:
    for _, text, _ in run(hsdp, 4, "raise", "", nodes=(2, 2)):
        assert text == ""


def one_dimension(rank: int, world_size: int, **options: Any) -> str:
    net = Made(mesh=over_all_ranks())()
    with pytest.raises(ConfigurationError) as raised:
        commopt.attach(net, "hierarchical", **options)
    return str(raised.value)


@pytest.mark.parametrize("options", [{"on_divergence": "raise"}, {"check_every": 5}])
def test_a_mesh_of_one_dimension_has_no_replicas(options: Any) -> None:
    for text in run(one_dimension, 2, **options):
        assert "for models with replicas, and ranks of a 1-D mesh hold different shards" in text


# ------------------------------------------------------------------------------------- options and bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check_every": -1}, "check_every is -1; it must be a whole number >= 0"),
        ({"check_every": True}, "check_every is True"),
        ({"on_divergence": "ignore"}, "on_divergence='ignore' is not known; pass one of 'warn', 'raise', 'resync'"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HookState(**options)


def differing(rank: int, world_size: int) -> str:
    ddp, _ = step_of(rank)
    with pytest.raises(MismatchError) as raised:
        commopt.attach(ddp, "flat", check_every=10 + rank)
    return str(raised.value)


def test_ranks_compare_the_options() -> None:
    assert all("ranks disagree about check_every" in text for text in run(differing, 2))


def sending(rank: int, world_size: int) -> list[int]:
    sent = []
    for every in (0, 1):
        ddp, train = step_of(rank)
        state = commopt.attach(ddp, "flat", check_every=every)
        for step in range(5):
            train(step)
        stats = state.stats()
        sent.append(stats["intra_bytes"] + stats["inter_bytes"])
        assert ("replica_checks" in stats) == bool(every)
    return sent


def test_a_check_sends_16_bytes_a_rank() -> None:
    checks, ring = 4, 2  # after steps 1 to 4; to the next rank go those of two
    for without, with_checks in run(sending, 3):
        assert with_checks - without == checks * ring * 16


def resuming(rank: int, world_size: int) -> str:
    ddp, train = step_of(rank)
    state = commopt.attach(ddp, "hierarchical_quantized", check_every=EVERY, on_divergence="raise")
    for step in range(5):
        train(step)
    state.load_state_dict(state.state_dict())
    if rank == ODD:
        flip_a_bit(ddp.module, None)
    train(5)
    train(6)
    with pytest.raises(MismatchError) as raised:
        train(7)
    return str(raised.value)


def test_what_was_found_before_a_checkpoint_is_loaded_bounds_nothing() -> None:
    assert all("no check before found them equal" in text for text in run(resuming, 3))


@pytest.mark.alone
def test_a_check_costs_less_than_a_thousandth_of_a_hundred_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    values, step_s, check_s = torch.randn(1024, 1024), list[float](), list[float]()
    for _ in range(7):
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        stepped = time.perf_counter()
        checksum([each.detach() for each in model.parameters()], CPU)
        step_s.append(stepped - begun)
        check_s.append(time.perf_counter() - stepped)
    assert median(check_s) < 0.001 * AttachOptions.check_every * median(step_s)
