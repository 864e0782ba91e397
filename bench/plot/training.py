"""A training benchmark: loss by time and by step, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.plot.bars import draw_bars
from bench.plot.curves import draw_curves
from bench.plot.style import save, styles
from bench.training.report import STOCK, Environment, Outcome, read

_MODELS = {"gpt": "GPT", "resnet50": "ResNet-50", "vgg11": "VGG-11", "vit": "ViT"}
_USUAL = 8  # strategies: more need a higher picture


def headline(environment: Environment, outcomes: Sequence[Outcome]) -> str:
    """Say in one sentence what the picture shows."""
    stock = next((outcome for outcome in outcomes if outcome.strategy == STOCK), None)
    fastest = max(outcomes, key=lambda outcome: outcome.steps)
    if stock is None or stock is fastest:
        return f"{environment.seconds:g} s of training with each strategy"
    ratio = fastest.steps / stock.steps
    return f"In the same {environment.seconds:g} s {fastest.strategy} takes {ratio:.1f}x as many steps as stock DDP"


def world(environment: Environment) -> str:
    """Say what was trained on which nodes."""
    ranks = "+".join(str(count) for count in environment.ranks_per_node)
    if len(set(environment.ranks_per_node)) == 1:
        ranks = f"{environment.ranks_per_node[0]}"
    model = f"{environment.parameters / 1e6:.1f}M-parameter {_MODELS.get(environment.model, environment.model)}"
    return f"{model}, {environment.nodes} nodes x {ranks} ranks, {environment.network}"


def circumstances(environment: Environment) -> str:
    """Say where the numbers were made."""
    hardware = f"{environment.cpu_count} CPU cores in all" if environment.device == "cpu" else environment.device
    return f"{world(environment)}, {environment.backend} on {hardware}; same seed and data for each"


def draw(environment: Environment, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw one picture: held-out loss by time and by step, and where the time of a step goes."""
    height = 5.8 + 0.55 * max(0, len(outcomes) - _USUAL)
    figure = Figure(figsize=(14, height), layout="constrained")
    figure.suptitle(headline(environment, outcomes), fontsize=17, fontweight="bold")
    by_time, by_step, bars = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    looks = styles([outcome.strategy for outcome in outcomes])
    draw_curves(by_time, environment, outcomes, looks, "seconds")
    draw_curves(by_step, environment, outcomes, looks, "steps")
    draw_bars(bars, outcomes, looks, environment.compute_ms)
    figure.legend(
        *by_time.get_legend_handles_labels(),
        title=circumstances(environment),
        loc="outside lower center",
        ncols=len(outcomes) if len(outcomes) <= 4 else 3,
        frameon=False,
    )
    save(figure, path)


def draw_file(file: Path, path: Path) -> None:
    """Draw what `file` has."""
    draw(*read(file), path)
