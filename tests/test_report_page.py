# SPDX-License-Identifier: Apache-2.0
"""The report as a page: whole, readable without a network, with every rank and message; and what it advises."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.__main__ import main
from commopt.attached.insight import _OTHERS
from commopt.errors import ConfigurationError
from commopt.groups import WireBytes
from commopt.recording import MessageRecord
from commopt.timeline import Report, Subject, Timeline, TrafficOutside, report
from commopt.timeline.advice import advice
from commopt.timeline.page import write_page
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded
from tests.html_pages import Page
from tests.ranks import run
from tests.timelines import training

MS = 1000.0


def reported(timeline: Timeline, *predicted: Any) -> Report:
    return report(timeline, WireBytes(1, 2), TrafficOutside(), "found", *predicted)


def page_of(timeline: Timeline, found: Report, file: Path) -> Page:
    write_page(file, timeline, found, "asked for: <auto> & more", ["kept", "left"])
    return Page(file)


def test_a_page_has_every_rank_and_message(tmp_path: Path) -> None:
    timeline = training(ranks=5, nodes=2, buckets=7, name="block{}.weight")
    page = page_of(timeline, reported(timeline, 3 * MS, [1e4 * n for n in range(1, 8)]), tmp_path / "page.html")
    for rank in range(5):
        assert page.texts.count(f"rank {rank}") == 1
    for bucket in range(7):
        assert page.texts.count(f"bucket {bucket}") == 1
        assert ("title", f"block{bucket}.weight") in page.attributes
        assert sum(text.startswith(f"bucket {bucket}: inter, ") for text in page.texts) == 5
        assert f"{10 * (bucket + 1):.2f}" in page.texts, "what was predicted stands beside it"
    assert page.attributes.count(("class", "predicted")) == 1 + 7
    assert {"asked for: <auto> & more", "kept", "left"} <= set(page.texts)
    places = [value for name, value in page.attributes if name in ("x", "x1", "width")]
    assert all(0 <= float(value.rstrip("%")) <= 100 for value in places)


def test_who_reads_a_page_while_it_is_written_anew_has_it_whole(tmp_path: Path) -> None:
    file, timeline = tmp_path / "page.html", training()
    page_of(timeline, reported(timeline), file)
    before = file.read_text()
    with file.open() as reader:
        page_of(training(ranks=5), reported(training(ranks=5)), file)
        assert reader.read() == before
    assert file.read_text() != before
    assert list(tmp_path.iterdir()) == [file]


def test_of_many_ranks_the_latest_are_drawn(tmp_path: Path) -> None:
    timeline = training(ranks=40, buckets=1, steps=5, delay_us=lambda step, rank, at: 9 * MS * (rank == 37))
    page = page_of(timeline, reported(timeline), tmp_path / "page.html")
    assert len([text for text in page.texts if re.fullmatch(r"rank \d+", text)]) == 32
    assert "rank 37" in page.texts
    assert any("8 more ranks" in text for text in page.texts)
    assert set(map(str, range(40))) <= set(page.texts), "the table has all"


def late(who: Callable[[int], int], bucket: int) -> Timeline:
    return training(delay_us=lambda step, rank, at: 30 * MS * (rank == who(step) and at == bucket))


@pytest.mark.parametrize(
    ("timeline", "predicted", "says"),
    [
        (training(transfer_us=100), (), "nothing to gain"),
        (training(transfer_us=9_000), (), "would take 30.0 ms instead of 51.0 ms, 41% less"),
        (late(lambda step: 1, 0), (), "rank 1 is 30.00 ms behind the others"),
        (late(lambda step: step % 4, 3), (), "not communication. No rank is late in every step"),
        (training(buckets=1), (), "only message cannot begin before"),
        (training(), (20 * MS,), "predicted 20.0 ms of exposed communication, and 9.0 ms are measured"),
    ],
    ids=["hidden", "exposed", "a late rank", "waiting", "one message", "mispredicted"],
)
def test_advice_follows_from_figures(timeline: Timeline, predicted: tuple[float, ...], says: str) -> None:
    assert says in " ".join(advice(timeline, reported(timeline, *predicted)))


def test_who_waits_for_a_leader_is_not_communicating_inside() -> None:
    plain = training(transfer_us=9_000)

    def led(message: MessageRecord) -> MessageRecord:
        first, last = message.spans
        return replace(message, spans=(replace(first, end_us=last.end_us),))

    steps = [
        [replace(each, messages=tuple(map(led, each.messages))) if rank % 2 else each for rank, each in enumerate(step)]
        for step in plain.steps
    ]
    timeline = replace(plain, steps=tuple(map(tuple, steps)))
    assert reported(timeline).analysis.messages[0].stages_us["intra"] > 5 * MS
    assert "60% of the transfer is between" in " ".join(advice(timeline, reported(timeline)))


SENDS = {"hierarchical": 800, "hierarchical_bf16": 400, "hierarchical_quantized": 201, "hierarchical_powersgd": 20}


@pytest.mark.parametrize(
    ("now", "strategy", "named", "auto"),
    [
        (800, "Hierarchical()", ["hierarchical_bf16", "hierarchical_quantized", "hierarchical_powersgd"], True),
        (400, "Hierarchical(inter=Compressed(Cast()))", ["hierarchical_quantized", "hierarchical_powersgd"], True),
        (201, "Hierarchical(inter=Compressed(Quantize()))", ["hierarchical_powersgd"], True),
        (20, "Hierarchical(inter=PowerSGD())", [], False),
        (20, "Hierarchical(inter=Compressed(OneBit(), adam=Adam()))", [], False),
        (800, "Auto(allow=('lossless',))", list(SENDS)[1:], False),
    ],
)
def test_advice_never_sends_more_than_what_is_in_use(now: int, strategy: str, named: list[str], auto: bool) -> None:
    """Of five presets those that send less are named with their bytes, and never the one in use."""
    inter = {name: nbytes * 10**6 for name, nbytes in SENDS.items()}
    found = replace(
        reported(training(transfer_us=9_000)),
        sent_per_step=WireBytes(0, now * 10**6),
        subject=Subject("Net", 200_000_000, strategy, "today", inter),
    )
    said = " ".join(advice(training(transfer_us=9_000), found))
    assert re.findall(r"(hierarchical\w*) (\d+) MB", said) == [(name, str(SENDS[name])) for name in named]
    assert ("let auto measure" in said) == auto
    assert ("No preset sends much less than the present 20 MB" in said) == (not named)
    assert ("directions, for AdamW" in said) == (not named and "adam=" not in strategy), "what is in use is no advice"


def test_work_inside_a_rank_advises_no_preset() -> None:
    timeline = training(transfer_us=9_000)
    busy = [[replace(each, messages=tuple(map(only_local, each.messages))) for each in step] for step in timeline.steps]
    timeline = replace(timeline, steps=tuple(map(tuple, busy)))
    (said,) = [text for text in advice(timeline, reported(timeline)) if "of the transfer is" in text]
    assert "commopt --version" in said
    assert not re.search("bf16|8 bits|hierarchical", said)


def only_local(message: MessageRecord) -> MessageRecord:
    return replace(message, spans=())


# ------------------------------------------------------------------------------------------- of a real run


def bytes_of_advice(rank: int, world_size: int, name: str) -> tuple[dict[str, int], int, int, str]:
    """Return what the report says of others, and of `name` itself, beside what a step past the start has sent."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, name, record=True)
    sent = []
    for step in range(8):
        loss_of(ddp, batch_of(rank, step)).backward()
        sent.append(state.stats()["inter_bytes"])
    found = state.report()
    assert found.subject is not None
    return dict(found.subject.inter_bytes), found.sent_per_step.inter, sent[-1] - sent[-2], str(found)


@pytest.mark.parametrize("name", ["hierarchical_powersgd", "hierarchical_quantized:bits=4", "hierarchical"])
def test_a_dense_start_is_no_part_of_what_a_step_sends(name: str) -> None:
    for others, per_step, measured, text in run(bytes_of_advice, 4, name, nodes=(2, 2)):
        assert per_step == measured == others[name]
        assert set(others) == set(_OTHERS)
        assert text.replace("\n  ", " ").startswith("Tower of 0.0250 million parameters, averaged by Hierarchical(")
        assert max(map(len, text.splitlines())) <= 80


def test_what_an_advice_names_is_what_presets_are() -> None:
    assert {name: repr(commopt.build_preset(name)) for name in _OTHERS} == {k: repr(v) for k, v in _OTHERS.items()}


def write_report(rank: int, world_size: int, folder: str) -> str:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "hierarchical", record=True)
    for step in range(4):
        loss_of(ddp, batch_of(rank, step)).backward()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        state.report(html=f"{folder}/none/page.html")
    return str(state.report(html=f"{folder}/page.html" if rank == 0 else None))


def test_a_state_writes_its_report_as_a_page(tmp_path: Path) -> None:
    texts = run(write_report, 4, str(tmp_path), nodes=(2, 2))
    page = Page(tmp_path / "page.html")
    assert {f"rank {rank}" for rank in range(4)} <= set(page.texts)
    line = next(line for line in texts[0].splitlines() if line.startswith("communication "))
    assert line in page.texts


SCRIPT = """
from torch.nn.parallel import DistributedDataParallel
from tests.html_pages import Page
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, loss_of, seeded
import torch.distributed as dist
for _ in range(2):
    ddp = DistributedDataParallel(seeded(Tower), **SMALL_BUCKET)
    for step in range(5):
        loss_of(ddp, batch_of(dist.get_rank(), step)).backward()
"""


def run_live(rank: int, world_size: int, folder: str, every: str) -> tuple[str, str]:
    script = Path(folder, f"train-{rank}.py")
    script.write_text(SCRIPT)
    html = ["--html", f"{folder}/page.html"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["run", "--strategy", "hierarchical", "--live", "--every", every, *html, str(script)]) == 0
    return out.getvalue(), err.getvalue()


def test_a_run_is_seen_live(tmp_path: Path) -> None:
    (out, err), silent = run(run_live, 2, str(tmp_path), "2", nodes=(1, 1))
    assert (err, silent) == ("", ("", ""))
    numel = sum(parameter.numel() for parameter in Tower().parameters())
    expected = (
        rf"Tower step (\d): [\d.]+ ms a step, exposed [\d.]+ ms \(\d+%\), {4 * numel / 1e6:.3g} MB "
        rf"\({4 * numel / 1e6:.3g} to other nodes\), {re.escape(repr(commopt.Hierarchical()))}"
    )
    assert [re.fullmatch(expected, line)[1] for line in out.splitlines()] == ["2", "4"] * 2  # type: ignore[index]
    for name in ("page.html", "page-2.html"):
        assert "rank 1" in Page(tmp_path / name).texts


def test_a_run_that_was_too_short_says_so(tmp_path: Path) -> None:
    (out, err), silent = run(run_live, 2, str(tmp_path), "6")
    assert (out, silent) == ("", ("", ""))
    assert "no model took 6 steps" in err
