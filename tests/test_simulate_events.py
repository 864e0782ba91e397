"""The event loop: by hand, against the closed forms of `commopt.cost`, and against `commopt.schedule.simulate`."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commopt.cost import StageTimes
from commopt.cost.formulas import overlapped_us
from commopt.schedule import Costs, PriceTable, Unit, simulate
from commopt.simulate.events import Message, run

TIMES = st.floats(0, 100)
STAGES = st.builds(StageTimes, TIMES, TIMES, TIMES)
CHUNKS = st.lists(STAGES, min_size=1, max_size=6).map(tuple)
MESSAGES = st.lists(st.builds(Message, st.floats(0, 500), st.floats(0, 10), CHUNKS), min_size=1, max_size=6)


def test_two_chunks_by_hand() -> None:
    spans = run([Message(5.0, 1.0, (StageTimes(2, 10, 3), StageTimes(2, 10, 3)))], lanes=2)
    assert [(span.stage, span.chunk, span.lane, span.begin_us, span.end_us) for span in spans] == [
        ("launch", 0, 0, 5, 6),
        ("up", 0, 0, 6, 8),
        ("up", 1, 0, 8, 10),
        ("across", 0, 1, 8, 18),
        ("down", 0, 0, 18, 21),
        ("across", 1, 1, 18, 28),
        ("down", 1, 0, 28, 31),
    ]


def test_a_message_waits_for_the_one_before_even_if_its_network_is_free() -> None:
    first, second = (Message(0.0, 1.0, (StageTimes(1, 5, 2),)) for _ in range(2))
    ends = [span.end_us for span in run([first, second], lanes=2) if span.stage == "down"]
    assert ends == [9, 18]


@given(CHUNKS)
def test_one_message_takes_what_the_closed_forms_say(chunks: tuple[StageTimes, ...]) -> None:
    message = Message(0.0, 0.0, chunks)
    assert run([message], lanes=2)[-1].end_us == pytest.approx(overlapped_us(chunks))
    assert run([message], lanes=1)[-1].end_us == pytest.approx(sum(map(sum, chunks)))


@pytest.mark.parametrize("lanes", [1, 2])
@given(messages=MESSAGES)
def test_messages_end_when_the_plan_says(lanes: int, messages: list[Message]) -> None:
    """`plan.simulate` knows each message as one time on one lane: here they are tables of a single price."""
    lane_us = [
        message.launch_us + (overlapped_us(message.chunks) if lanes == 2 else sum(map(sum, message.chunks)))
        for message in messages
    ]
    units = [Unit((f"p{number}",), 8, message.ready_us, "float32") for number, message in enumerate(messages)]
    expected, free_us = [], 0.0
    for unit, time_us in zip(units, lane_us, strict=True):  # a message each, of a length of its own
        costs = Costs({"it": PriceTable((0,), (time_us,))})
        free_us = max(free_us, unit.ready_us) + simulate([unit], [unit.names], "it", costs).communication_us
        expected.append(free_us)
    spans = run(messages, lanes)
    found = [max(span.end_us for span in spans if span.message == number) for number in range(len(messages))]
    assert found == pytest.approx(list(expected))


@pytest.mark.parametrize("lanes", [1, 2])
@given(messages=MESSAGES)
def test_a_lane_does_one_thing_at_a_time_and_nothing_begins_too_early(lanes: int, messages: list[Message]) -> None:
    spans = run(messages, lanes)
    assert len(spans) == sum(1 + 3 * len(message.chunks) for message in messages)
    assert {span.lane for span in spans} == set(range(lanes))
    for lane in range(lanes):
        mine = sorted((span for span in spans if span.lane == lane), key=lambda span: (span.begin_us, span.end_us))
        assert all(one.end_us <= other.begin_us for one, other in pairwise(mine))
    at = {(span.message, span.chunk, span.stage): span for span in spans}
    for number, message in enumerate(messages):
        assert at[number, 0, "launch"].begin_us >= message.ready_us
        for chunk in range(len(message.chunks)):
            ends = [at[number, chunk, stage] for stage in ("up", "across", "down")]
            assert all(one.end_us <= other.begin_us for one, other in pairwise(ends))


def test_order_is_first_come_first_served() -> None:
    """A late first message holds up those behind it, which is what keeps the ranks in step."""
    messages = [Message(ready, 0.0, (StageTimes(1, 1, 1),)) for ready in (100.0, 0.0, 0.0)]
    ends = [span.end_us for span in run(messages, 1) if span.stage == "down"]
    assert ends == list(accumulate([3, 3], initial=103))


def test_nothing_to_send_takes_no_time() -> None:
    assert run([], 2) == []
