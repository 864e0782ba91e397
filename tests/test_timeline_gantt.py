"""The picture of a step: every rank and bucket is in it, in each format, for few and many."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commopt.errors import ConfigurationError
from commopt.timeline import Timeline, draw
from tests.timelines import training

matplotlib = pytest.importorskip("matplotlib")

MS = 1000.0


def texts(timeline: Timeline, folder: Path, **options: Any) -> list[str]:
    """Every text in the picture."""
    path = folder / "step.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(timeline, path, **options)
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_ranks_buckets_and_what_was_found_are_written(tmp_path: Path) -> None:
    found = texts(training(ranks=4, buckets=3), tmp_path)
    assert [text for text in found if text.startswith("rank ")] == [f"rank {rank}" for rank in range(4)]
    for bucket in "012":
        assert found.count(bucket) >= 4
    assert "24 % of the step is exposed communication" in found
    assert "step 0; typical: step 33.0 ms = compute 25.0 + exposed 8.0" in found
    assert "collective between nodes" in found
    assert "collective over all ranks" not in found


def test_a_late_rank_is_the_headline(tmp_path: Path) -> None:
    slow = training(delay_us=lambda step, rank, at: 200 * MS if (rank, at) == (1, 2) else 0.0)
    assert "The ranks wait for rank 1: 200.0 ms late" in texts(slow, tmp_path)
    two = training(ranks=6, delay_us=lambda step, rank, at: (20 + rank) * MS if rank < 2 and at == 2 else 0.0)
    assert "The ranks wait for rank 1 and 1 more: 21.0 ms late" in texts(two, tmp_path)


def test_of_many_ranks_the_latest_are_shown(tmp_path: Path) -> None:
    many = training(ranks=40, buckets=2, steps=6, delay_us=lambda step, rank, at: 9 * MS if rank >= 30 else 0.0)
    found = texts(many, tmp_path)
    shown = [int(text.split()[1]) for text in found if re.fullmatch(r"rank \d+", text)]
    assert len(shown) == 16
    assert set(range(30, 40)) <= set(shown)
    assert any(text.endswith("the 16 latest of 40 ranks") for text in found)


def test_of_many_buckets_some_are_numbered(tmp_path: Path) -> None:
    found = texts(training(ranks=2, buckets=60), tmp_path)
    numbered = [int(text) for text in found if text.isdigit() and int(text) < 60]
    assert 20 <= len(numbered) <= 120


def test_several_steps_and_a_step_by_its_number(tmp_path: Path) -> None:
    timeline = training(steps=6)
    assert any(text.startswith("steps 2 to 4;") for text in texts(timeline, tmp_path, step=2, steps=3))
    assert any(text.startswith("step 5;") for text in texts(timeline, tmp_path, step=5, steps=3))
    with pytest.raises(ConfigurationError, match="step=9 was not recorded; pass one of 0-5,"):
        draw(timeline, tmp_path / "step.svg", step=9)
    with pytest.raises(ConfigurationError, match="steps=0 leaves nothing to draw; pass 1 or more"):
        draw(timeline, tmp_path / "step.svg", steps=0)


def test_steps_that_do_not_follow_each_other_are_not_drawn_together(tmp_path: Path) -> None:
    timeline = training(steps=9)
    gap = replace(timeline, steps=timeline.steps[:3] + timeline.steps[6:])
    assert any(text.startswith("steps 1 to 2;") for text in texts(gap, tmp_path, step=1, steps=5))
    with pytest.raises(ConfigurationError, match="step=4 was not recorded; pass one of 0-2,6-8, or None"):
        draw(gap, tmp_path / "step.svg", step=4)


def test_a_step_of_no_length_has_a_headline(tmp_path: Path) -> None:
    still = training(ranks=1, nodes=1, buckets=1, forward_us=0, bucket_us=0, transfer_us=0)
    assert "0 % of the step is exposed communication" in texts(still, tmp_path)


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_other_formats(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"step{suffix}"
    draw(training(ranks=2, buckets=1), path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no format to draw in; pass a name that ends in \.svg"):
        draw(training(), tmp_path / "step.txt")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigurationError, match="pip install matplotlib"):
        draw(training(), tmp_path / "step.png")
