# SPDX-License-Identifier: Apache-2.0
"""Adam before the wire: torch.optim.AdamW where nothing is left out, and nothing is lost where something is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import DGC, Adam, Aggregator, Compressed, ConfigurationError, Hierarchical, OneBit
from commopt.aggregate.adam import COMPARE_EVERY_STEPS
from commopt.feedback import Layout
from commopt.groups import TeamShape
from tests.catalogue import run_on
from tests.chosen import threads
from tests.feedback_training import NUMELS, Training, Vectors, residual_of, residuals_of, total, zero_gradients, zeros
from tests.hook_training import assert_identical
from tests.ranks import run
from tests.sharded_training import batch, hsdp_mesh
from tests.test_sharded_modes import WithoutItsHead, last_layer_with_the_head

TORCH = Adam(betas=(0.9, 0.999))  # as torch.optim.AdamW by default
EXACT = Hierarchical(Compressed(OneBit(64, start_step=1_000_000), adam=TORCH))  # dense for ever: exact
SIGNS = Hierarchical(Compressed(OneBit(64), adam=TORCH))
STRATEGIES: dict[str, Aggregator] = {
    "exact": EXACT,
    "signs": SIGNS,
    "signs, flat": Compressed(OneBit(64), adam=TORCH),
    "largest": Hierarchical(Compressed(DGC(0.05), adam=TORCH)),
    "clipped": Hierarchical(Compressed(OneBit(64), adam=Adam((0.9, 0.95), clip_norm=1.0))),
}
LR, DECAY = 0.01, 0.1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 41), nn.Tanh(), nn.Linear(41, 5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) * self.frozen[0]
        return y


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, noise = (torch.randn(8, width, generator=generator, device="cpu") for width in (30, 5))
    return tuple(each.to(torch.get_default_device()) for each in (x, x[:, :5].sin() + 0.1 * noise))  # type: ignore[return-value]


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [each for each in module.parameters() if each.requires_grad and each.dim() > 1]
    others = [each for each in module.parameters() if each.requires_grad and each.dim() == 1]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": others, "lr": LR / 2, "weight_decay": 0.0}]


class Trainer:
    """A DDP model of one rank; `data_of` says whose data a rank sees."""

    def __init__(
        self, rank: int, aggregator: Aggregator, scaler: torch.amp.GradScaler | None = None, **options: Any
    ) -> None:
        self.rank, self.scaler = rank, scaler
        self.module = Net()
        self.ddp = TorchDDP(self.module, bucket_cap_mb=0.02)
        self.comm = commopt.attach(self.ddp, aggregator, scaler=scaler, **options)
        self.optimizer = self.comm.optimizer(groups_of(self.module), lr=LR)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def step(self, step: int, *, spoil: float = 1.0, micros: int = 1) -> None:
        self.optimizer.zero_grad()
        for micro in range(micros):
            self.ddp.require_backward_grad_sync = micro + 1 == micros
            x, y = data(self.rank, step * micros + micro)
            loss = (self.ddp(x) - y).square().mean() * spoil
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.schedule.step()

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.module.parameters()])


def by_adamw(ranks: list[int], steps: int, micros: int = 1) -> Tensor:
    """Train one replica with torch.optim.AdamW on the mean gradient of the ranks' data."""
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=LR)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            for micro in range(micros):
                x, y = data(rank, step * micros + micro)
                ((module(x) - y).square().mean() / len(ranks)).backward()
        optimizer.step()
        schedule.step()
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def train_exactly(rank: int, world_size: int, equal: bool, steps: int, micros: int) -> Tensor:
    trainer = Trainer(0 if equal else rank, EXACT)
    for step in range(steps):
        trainer.step(step, micros=micros)
    return trainer.weights()


@pytest.mark.parametrize(
    ("layout", "equal", "steps", "micros"),
    [
        ("2", False, 200, 1),
        ("3", False, 40, 2),
        ("1+1", True, 200, 1),
        pytest.param("3", False, 200, 2, marks=pytest.mark.slow),
        pytest.param("2x2", True, 200, 1, marks=pytest.mark.slow),
        pytest.param("2+1", True, 200, 1, marks=pytest.mark.slow),
    ],
)
def test_without_compression_it_is_adamw(layout: str, equal: bool, steps: int, micros: int) -> None:
    """Groups, a schedule, decoupled decay, accumulation, a frozen parameter, and buckets that change on the way."""
    results = run_on(layout, train_exactly, equal, steps, micros)
    with threads(1):
        expected = by_adamw([0] if equal else list(range(len(results))), steps, micros)
    for weights in results:
        assert torch.equal(weights, results[0])
        assert float((weights - expected).norm() / expected.norm()) < 1e-6


def train_replicas(rank: int, world_size: int) -> float:
    """Return how far a model of HSDP, whose nodes see the same data, is from one that torch's AdamW has trained."""
    sharded, alone = Net().layers, Net().layers
    fully_shard(sharded, mesh=hsdp_mesh())
    ours = commopt.attach(sharded, EXACT).optimizer(sharded.parameters(), lr=LR, weight_decay=DECAY)
    adamw = torch.optim.AdamW(alone.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(10):
        for optimizer, module, seen in ((ours, sharded, [rank % 2]), (adamw, alone, [0, 1])):
            optimizer.zero_grad()
            for each in seen:
                x, y = data(each, step)
                ((module(x) - y).square().mean() / len(seen)).backward()
            optimizer.step()
    found = torch.cat([cast(DTensor, each).full_tensor().detach().flatten() for each in sharded.parameters()])
    expected = torch.cat([each.detach().flatten() for each in alone.parameters()])
    return float((found - expected).norm() / expected.norm())


def test_replicas_of_fsdp2_are_trained_by_adamw_too() -> None:
    assert max(run(train_replicas, 4, nodes=(2, 2))) < 1e-6


# ----------------------------------------------------------------------------------------- feedback


def directions_of(state: Mapping[str, Any], before: Mapping[str, Any], step: int, nodes: int) -> Vectors:
    """Return what this rank owes of a step, f u_k / K, by its moments; zero where others of the node hold them."""
    roles = residuals_of(state)
    means, squares = roles["inter.exp_avg/worker"], roles["inter.exp_avg_sq/worker"]
    owed = zeros()
    for name, mean in means.items():
        mean_hat, square_hat = (
            mean.double() / (1 - 0.9 ** (step + 1)),
            squares[name].double() / (1 - 0.999 ** (step + 1)),
        )
        owed[name] = mean_hat / (square_hat.sqrt() + 1e-8) / nodes
    agreed = {piece: 1.0 for piece in state["residuals"]["inter.exp_avg/worker"]}
    for entry in (state if step % COMPARE_EVERY_STEPS else before)["factors"]:  # as they were when it was sent
        name, begin, end = entry["piece"]
        agreed[f"{name}[{begin}:{end}]"] = float(entry["right"])
    for piece, share in agreed.items():
        name, _, span = piece.rpartition("[")
        begin, end = map(int, span.rstrip("]").split(":"))
        owed[name][begin:end] *= (share + (1 - share) / nodes) ** -0.5
    return owed


def keep_books(rank: int, world_size: int, name: str, nodes: int, steps: int) -> tuple[list[Vectors], str, list[float]]:
    """Return, after the last step, what was owed, told and is left, and the agreement of the nodes."""
    training = Training(rank, world_size, STRATEGIES[name], options={"bucket_cap_mb": 100})
    owed = zeros()
    for step in range(steps):
        before = training.comm.state_dict()
        training.step()
        for key, values in directions_of(training.comm.state_dict(), before, step, nodes).items():
            owed[key] += values
    state = training.comm.state_dict()
    agreed = [float(entry["right"]) for entry in state["factors"]]
    return [owed, training.told, residual_of(state)], training.digest(), agreed


@pytest.mark.parametrize(
    ("name", "layout", "nodes"),
    [("signs", "1+1", 2), ("largest", "2x2", 2), ("signs", "3x2", 3)],
)
def test_no_update_is_lost(name: str, layout: str, nodes: int) -> None:
    """Directions of all steps are what was applied and what the residuals hold, f included."""
    results = run_on(layout, keep_books, name, nodes, 20)
    assert_identical([digest for _, digest, _ in results])
    owed, left = (total([books[place] for books, _, _ in results]) for place in (0, 2))
    told = results[0][0][1]
    for key, values in owed.items():
        lost = float((values - told[key] - left[key]).abs().max())
        assert lost < 1e-4, (key, lost)
    assert max(float(values.abs().max()) for values in left.values()) > 0.1, "nothing was left out"
    agreed = [each for _, _, mine in results for each in mine]
    if layout == "1+1":  # one that has longer directions than the others would find that they do not follow its own
        assert results[0][2] == results[1][2]
    assert all(0 <= each <= 1 for each in agreed)
    assert min(agreed) < 0.9  # every rank has gradients of its own


# ----------------------------------------------------------------------------------------- state


def save_moments(rank: int, world_size: int, folder: str) -> list[Vectors]:
    training = Training(rank, world_size, STRATEGIES["signs"])
    for _ in range(4):
        training.step()
    state = training.comm.gathered_state_dict()
    if state is not None:
        torch.save(state, f"{folder}/state.pt")
    roles = residuals_of(training.comm.state_dict())
    return [roles["inter.exp_avg/worker"], roles["inter.exp_avg_sq/worker"]]


def load_moments(rank: int, world_size: int, folder: str) -> tuple[list[Vectors], str]:
    """Return both moments after a step with gradients of zero."""
    training = Training(rank, world_size, STRATEGIES["signs"], chosen=zero_gradients)
    training.comm.load_state_dict(torch.load(f"{folder}/state.pt"))
    training.step()
    roles = residuals_of(training.comm.state_dict())
    return [roles.get(f"inter.{each}/worker", {}) for each in ("exp_avg", "exp_avg_sq")], training.digest()


@pytest.mark.parametrize(("new", "nodes"), [("2x2 interleaved", 2), ("2+1", 2), ("3", 1)])
def test_another_world_gets_the_average_of_the_moments(tmp_path: Path, new: str, nodes: int) -> None:
    """Every node goes on with the mean of the old nodes' m and v, whatever its ranks are."""
    saved = run_on("2x2", save_moments, str(tmp_path))
    results = run_on(new, load_moments, str(tmp_path))
    assert_identical([digest for _, digest in results])
    for place, beta in ((0, 0.9), (1, 0.999)):
        for name in NUMELS:
            mean = sum(moments[place][name] for moments in saved if name in moments[place]) / 2
            now = sum(moments[place][name] for moments, _ in results if name in moments[place]) / nodes
            torch.testing.assert_close(now, beta * mean, rtol=1e-5, atol=1e-7)


def load_gradients(rank: int, world_size: int) -> list[str]:
    """Return what is said of a checkpoint of the other kind, in both directions."""
    errors = []
    kinds = [Hierarchical(Compressed(OneBit(64))), STRATEGIES["signs"]]
    for one, other in (kinds, kinds[::-1]):
        training = Training(rank, world_size, one)
        training.step()
        with pytest.raises(ConfigurationError) as caught:
            Training(rank, world_size, other).comm.load_state_dict(training.comm.state_dict())
        errors.append(str(caught.value))
    return errors


def test_residuals_of_gradients_and_of_updates_are_not_mixed() -> None:
    (first, second), _ = run(load_gradients, 2, nodes=(1, 1))
    assert "directions" in first
    assert "exp_avg" in second


def spoil_a_step(rank: int, world_size: int) -> tuple[bool, bool]:
    """Return whether gradients of a step with a NaN on rank 0 were finite, and whether anything kept was changed."""
    trainer = Trainer(rank, STRATEGIES["signs"])
    for step in range(3):
        trainer.step(step)
    before = trainer.comm.state_dict()
    trainer.step(3, spoil=float("nan") if rank == 0 else 1.0)
    after = trainer.comm.state_dict()
    finite = all(bool(each.grad.isfinite().all()) for each in trainer.module.parameters() if each.grad is not None)
    kept = [(before["residuals"][path], after["residuals"][path]) for path in before["residuals"]]
    return finite, any(not torch.equal(one[piece], other[piece]) for one, other in kept for piece in one)


def test_a_step_that_is_not_finite_reaches_every_rank_and_changes_no_moment() -> None:
    assert run(spoil_a_step, 2, nodes=(1, 1)) == [(False, False)] * 2


# ----------------------------------------------------------------------------------------- clipping


def clip_spikes(rank: int, world_size: int, factor: float) -> list[float]:
    """Return, step by step, the norm that v expects of a gradient of norm 10, `factor` times it in step 40."""

    def chosen(rank: int, step: int, dtype: torch.dtype) -> Vectors:
        ones = {name: torch.ones(numel, dtype=dtype) for name, numel in NUMELS.items()}
        norm = sum(NUMELS.values()) ** 0.5
        return {name: values * 10 / norm * (factor if step == 40 else 1.0) for name, values in ones.items()}

    training = Training(rank, world_size, STRATEGIES["clipped"], chosen=chosen)
    norms = []
    for _ in range(45):
        training.step()
        norms.append(training.comm.state_dict()["expected_square"] ** 0.5)
    return norms


def test_the_norm_of_all_gradients_is_clipped_before_the_moments() -> None:
    """The first step is not clipped; a spike is, in its own step; all ranks and nodes expect the same."""
    results = run(clip_spikes, 4, 1000.0, nodes=(2, 2))
    assert len({tuple(norms) for norms in results}) == 1
    norms = results[0]
    assert norms[0] == pytest.approx(10.0)
    # Only what the first step left is above the limit, and fades: (1 + 99 (1 - b2) b2^t / (1 - b2^(t+1)))^(1/2).
    assert norms[39] == pytest.approx((1 + 99 * 0.05 * 0.95**39 / (1 - 0.95**40)) ** 0.5, rel=1e-3)
    assert norms[40] <= norms[39]


# ----------------------------------------------------------------------------------------- what is refused


def step_by(rank: int, world_size: int, make: Callable[[Any], torch.optim.Optimizer]) -> str:
    ddp = TorchDDP(Net())
    comm = commopt.attach(ddp, "hierarchical_onebit", adam=Adam())
    optimizer = make(ddp.parameters())
    ddp(data(rank, 0)[0]).sum().backward()
    with pytest.raises(ConfigurationError) as caught:
        optimizer.step()
    ours = comm.optimizer(ddp.parameters(), lr=0.1)
    ours.step()
    unrelated = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    unrelated.step()
    return str(caught.value)


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def muon_of_matrices(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.AdamW, "AdamW"),
        (torch.optim.RMSprop, "RMSprop"),
        (sgd_with_momentum, "momentum"),
        (muon_of_matrices, "Muon"),
    ],
)
def test_a_second_adam_is_refused_by_name(make: Callable[[Any], torch.optim.Optimizer], name: str) -> None:
    for message in run(step_by, 2, make, nodes=(1, 1)):
        assert name in message
        assert "comm.optimizer(" in message


def use_twice(rank: int, world_size: int) -> str:
    """Train with a loss in chunks, each of which reduces the gradients of the head."""
    net = WithoutItsHead()
    last_layer_with_the_head(net, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    commopt.attach(net, SIGNS)
    first, second = (chunk.requires_grad_() for chunk in net(batch(0)).detach().chunk(2))
    net.head(first).square().sum().backward()
    loss = net.head(second).square().sum()
    with pytest.raises(ConfigurationError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="groups of which only a part runs are of torch 2.13"
)
def test_a_gradient_in_two_messages_is_refused() -> None:
    """Moments would advance twice."""
    for message in run(use_twice, 2, nodes=(1, 1)):
        assert "in two messages" in message


def ask_wrongly(rank: int, world_size: int) -> list[str]:
    ddp = TorchDDP(Net())
    comm = commopt.attach(ddp, "hierarchical_onebit", adam=True)
    gradients = commopt.attach(TorchDDP(Net()), "hierarchical")
    wrong: list[Callable[[], object]] = [
        lambda: gradients.optimizer(ddp.parameters(), lr=0.1),
        lambda: comm.optimizer([{"params": ddp.parameters(), "betas": (0.9, 0.99)}], lr=0.1),
        lambda: comm.optimizer([nn.Parameter(torch.ones(2))], lr=0.1),
    ]
    messages = []
    for each in wrong:
        with pytest.raises(ConfigurationError) as caught:
            each()
        messages.append(str(caught.value))
    return messages


def test_what_optimizer_refuses() -> None:
    for messages in run(ask_wrongly, 2):
        for message, part in zip(messages, ("adam=commopt.Adam()", "betas=(0.9, 0.99)", "1 of 1"), strict=True):
            assert part in message


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Adam(betas=(0.9, 1.0)), "betas=(0.9, 1.0)"),
        (lambda: Adam(eps=-1.0), "eps=-1.0"),
        (lambda: Adam(clip_norm=0), "clip_norm=0"),
        (lambda: Compressed(OneBit(), adam="yes"), "adam='yes'"),  # type: ignore[arg-type]
        (lambda: commopt.build_preset("hierarchical_dgc:adam=(0.5,2)"), "betas=(0.5, 2)"),
        (lambda: Compressed(OneBit(), feedback=None, adam=Adam()), "feedback"),
        (lambda: commopt.hierarchical_powersgd(adam=Adam()), "no option adam"),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object], part: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(part)):
        make()


def count_bytes(rank: int, world_size: int, name: str, steps: int) -> int:
    training = Training(rank, world_size, STRATEGIES[name])
    for _ in range(steps):
        training.step()
    sent: int = training.comm.stats()["inter_bytes"]
    return sent


def test_what_adam_exchanges_beside_directions_is_counted() -> None:
    """A square and a product of each parameter in every eighth step, and with clip_norm one number in each."""
    usual, clipped = (sum(run(count_bytes, 2, name, 8, nodes=(1, 1))) for name in ("signs", "clipped"))
    assert clipped - usual == 2 * 8 * 8  # float64, by each of two ranks
    aggregator, layout, team = STRATEGIES["signs"], Layout.of_parameters([("a", (100, 128))]), TeamShape.of((1, 1))
    first, second = (
        aggregator.wire_bytes(layout, torch.float32, team, torch.device("cpu"), step).inter for step in (0, 1)
    )
    assert first - second == 2 * 4


# ----------------------------------------------------------------------------------------- parameters that rest


class Sometimes(nn.Module):
    """A second layer, which is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(16, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        hidden: Tensor = self.always(x).tanh()
        return self.sometimes(hidden) if used else hidden


def is_used(step: int, rank: int) -> bool:
    return step % 4 == 2 or (step % 4 == 3 and rank == 0)


def rest(rank: int, world_size: int, equal: bool, scaled: bool, loads: str) -> float:
    """Return how far a model is from torch's AdamW after steps in which a layer is used by all, one rank, or none.

    loads: a checkpoint on the way, of the version before parameters were counted, or of this one.
    """
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=256.0)
    models = [TorchDDP(Sometimes(), find_unused_parameters=True, bucket_cap_mb=0.003) for _ in range(2)]
    comm = commopt.attach(models[0], EXACT, scaler=scaler if scaled else None)
    others = torch.optim.AdamW(models[1].parameters(), lr=LR, weight_decay=0.0)
    optimizers = [comm.optimizer(models[0].parameters(), lr=LR, weight_decay=0.0), others]
    for step in range(20):
        generator = torch.Generator().manual_seed(step * 2 + (0 if equal else rank))
        x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 40, generator=generator)
        spoil = float("inf") if scaled and step in (1, 6) and rank == 0 else 1.0
        for model, optimizer, own in zip(models, optimizers, (scaler, copy.deepcopy(scaler)), strict=True):
            loss = (model(x, is_used(step, 0 if equal else rank)) - y).square().mean() * spoil
            own.scale(loss).backward()
            own.step(optimizer)
            own.update()
            optimizer.zero_grad()
        if step == 9 and loads:
            state = comm.state_dict()
            if loads == "old":
                del state["adam_steps"]
            comm.load_state_dict(state)
    found, expected = (torch.cat([each.detach().flatten() for each in model.parameters()]) for model in models)
    return float((found - expected).norm() / (expected - start_of(Sometimes())).norm())


def start_of(module: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters()])


@pytest.mark.parametrize(
    ("layout", "scaled", "loads"), [("2", False, ""), ("2", True, "new"), ("1+1", False, "new"), ("2x2", True, "")]
)
def test_a_parameter_without_gradients_rests_as_with_adamw(layout: str, scaled: bool, loads: str) -> None:
    """Moments and the steps of its bias correction stay where they are."""
    for away in run_on(layout, rest, layout != "2", scaled, loads):
        assert away < 1e-5


def test_a_checkpoint_that_does_not_count_parameters_loads() -> None:
    """They go on from the steps of the model, as they did."""
    for away in run_on("2", rest, False, False, "old"):
        assert 1e-5 < away < 1


def bytes_of_rest(rank: int, world_size: int, unused: bool) -> int:
    ddp = TorchDDP(Sometimes(), find_unused_parameters=unused)
    comm = commopt.attach(ddp, EXACT)
    optimizer = comm.optimizer(ddp.parameters(), lr=LR)
    for _ in range(3):
        ddp(torch.ones(2, 16), True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent: int = comm.stats()["inter_bytes"]
    return sent


def test_who_is_used_is_exchanged_where_parameters_may_rest_only() -> None:
    """A float32 of each of four parameters, in each of three steps, by each of two ranks."""
    asked, not_asked = (sum(run(bytes_of_rest, 2, unused, nodes=(1, 1))) for unused in (True, False))
    assert asked - not_asked == 4 * 4 * 3 * 2


def rest_in_shards(rank: int, world_size: int) -> float:
    """Return how far a model of HSDP, one layer of which is used in some steps, is from torch's AdamW."""
    sharded, alone = Sometimes(), Sometimes()
    for layer in (sharded.always, sharded.sometimes, sharded):
        fully_shard(layer, mesh=hsdp_mesh())
    ours = commopt.attach(sharded, EXACT).optimizer(sharded.parameters(), lr=LR, weight_decay=0.0)
    adamw = torch.optim.AdamW(alone.parameters(), lr=LR, weight_decay=0.0)
    for step in range(12):
        for optimizer, module, seen in ((ours, sharded, [rank % 2]), (adamw, alone, [0, 1])):
            optimizer.zero_grad()
            for each in seen:
                generator = torch.Generator().manual_seed(2 * step + each)
                x, y = torch.randn(8, 16, generator=generator), torch.randn(8, 40, generator=generator)
                ((module(x, step % 3 == 1) - y).square().mean() / len(seen)).backward()
            optimizer.step()
    found = torch.cat([cast(DTensor, each).full_tensor().detach().flatten() for each in sharded.parameters()])
    expected = start_of(alone)
    return float((found - expected).norm() / (expected - start_of(Sometimes())).norm())


def test_a_layer_of_fsdp2_without_gradients_rests_too() -> None:
    # In fresh processes: torch's DTensor remembers groups of an earlier job's mesh that is equal to this one's.
    assert max(run(rest_in_shards, 4, nodes=(2, 2), fresh=True)) < 1e-5


def leave_steps_out(rank: int, world_size: int, sharded: bool) -> None:
    """Go back to a checkpoint behind a backward, then on with another strategy beside the closed state."""

    def backward() -> None:
        optimizer.zero_grad()
        model(data(rank, 0)[0]).square().mean().backward()

    module = Net()
    if sharded:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh, ignored_params={module.frozen})
    model: nn.Module = module if sharded else TorchDDP(module)
    comm = commopt.attach(model, SIGNS)
    optimizer: torch.optim.Optimizer = comm.optimizer(groups_of(module), lr=LR)
    for _ in range(2):
        backward()
        optimizer.step()
    saved = comm.state_dict()
    backward()
    comm.load_state_dict(saved)
    backward()
    optimizer.step()
    backward()
    comm.close()
    model = module if sharded else TorchDDP(module)
    other = commopt.attach(model, commopt.hierarchical)
    optimizer = torch.optim.AdamW(groups_of(module), lr=LR)
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    optimizer.step()
    backward()
    optimizer.step()
    other.close()
    comm.close()  # kept to the end, as the frames of an error keep one


@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_that_goes_back_or_is_closed_asks_for_no_step_of_before(sharded: bool) -> None:
    run(leave_steps_out, 2, sharded, nodes=(1, 1), fresh=sharded)


def load_large_moments(rank: int, world_size: int) -> float:
    trainer = Trainer(rank, Hierarchical(Compressed(DGC(0.05, value_dtype=torch.float16), adam=TORCH)))
    for step in range(2):
        trainer.step(step, spoil=1e6)
    saved = trainer.comm.state_dict()
    trainer.comm.load_state_dict(saved)
    return max(float(each.max()) for each in saved["residuals"]["inter.exp_avg_sq/worker"].values())


def test_squares_that_16_bits_cannot_hold_are_loaded() -> None:
    assert min(run(load_large_moments, 2, nodes=(1, 1))) > torch.finfo(torch.float16).max
