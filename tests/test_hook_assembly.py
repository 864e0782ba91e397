"""Which of DDP's buckets travel together, and when."""

from __future__ import annotations

import pytest
import torch

from commopt.bucketing.assembly import Assembly
from commopt.bucketing.grouping import Grouping
from commopt.bucketing.messages import Held, Message, packed
from commopt.feedback import Layout, Scratch
from commopt.plan import Bucket, Plan

BUCKETS = [Layout.of_parameters([(name, (3,)) for name in names]) for names in ("ab", "c", "de", "f")]


def plan_of(*names: str, order: tuple[int, ...] = ()) -> Plan:
    return Plan(tuple(Bucket(tuple(each), 12 * len(each), "Flat()") for each in names), order)


def step(assembly: Assembly, buckets: list[Layout] = BUCKETS) -> list[list[tuple[int, ...]]]:
    """Bring the buckets of one step; return what was sent after each."""
    assembly.begin_step()
    sent = []
    for number, layout in enumerate(buckets):
        held = Held(number, layout, torch.full((layout.numel,), float(number)))
        sent.append([message.numbers for message in assembly.add(held, last=number + 1 == len(buckets))])
    return sent


def test_without_a_plan_every_bucket_goes_by_itself() -> None:
    assembly = Assembly()
    for _ in range(3):
        assert step(assembly) == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_a_plan_counts_from_the_step_after_the_buckets_were_seen() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("abc", "de", "f"))
    assert step(assembly) == [[(0,)], [(1,)], [(2,)], [(3,)]]
    assert step(assembly) == [[], [(0, 1)], [(2,)], [(3,)]]
    assembly.follow(plan_of("ab", "cdef"))
    assert step(assembly) == [[(0,)], [], [], [(1, 2, 3)]]
    assembly.follow(None)
    assert step(assembly) == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_a_bucket_goes_where_its_latest_gradient_goes() -> None:
    assert Grouping.of(plan_of("a", "bcd", "ef"), BUCKETS).shares == (1, 1, 2, 2)


def test_other_buckets_than_foreseen_are_sent_as_they_come() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("abc", "def"))
    step(assembly)
    others = [BUCKETS[0], BUCKETS[3], BUCKETS[1], BUCKETS[2]]
    assert step(assembly, others) == [[], [(0, 1)], [(2,)], [(3,)]]
    assert not assembly.settled
    step(assembly, others)
    assert assembly.settled


def test_fewer_buckets_than_foreseen_leave_nothing_behind() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("abc", "def"))
    step(assembly)
    assert step(assembly, BUCKETS[:1]) == [[(0,)]]


def test_a_backward_that_raised_leaves_nothing_behind() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("abcdef"))
    step(assembly)
    assembly.begin_step()
    assert assembly.add(Held(0, BUCKETS[0], torch.ones(6)), last=False) == []
    assert step(assembly) == [[], [], [], [(0, 1, 2, 3)]]


def test_messages_wait_for_their_turn() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("ab", "c", "de", "f", order=(0, 3, 2, 1)))
    step(assembly)
    assert step(assembly) == [[(0,)], [], [], [(3,), (2,), (1,)]]


def test_an_order_that_does_not_fit_is_not_followed() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("a", "b", "c", "def", order=(3, 2, 1, 0)))
    step(assembly)
    assert step(assembly) == [[(0,)], [(1,)], [], [(2, 3)]]


def test_a_plan_for_other_parameters_is_not_followed() -> None:
    assembly = Assembly()
    assembly.follow(plan_of("abc"))
    step(assembly)
    assert step(assembly) == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_a_checkpoint_is_followed_until_the_buckets_are_its_own() -> None:
    assembly = Assembly()
    assembly.imitate([BUCKETS[1], BUCKETS[0], Layout.of_parameters([(name, (3,)) for name in "def"])])
    assert step(assembly) == [[], [], [], [(0, 1, 2, 3)]]
    assembly.imitate(BUCKETS)
    assert step(assembly) == [[], [], [], [(0, 1, 2, 3)]]
    assert step(assembly) == [[(0,)], [(1,)], [(2,)], [(3,)]]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
def test_what_is_packed_comes_back(dtypes: tuple[torch.dtype, ...]) -> None:
    held = [
        Held(number, layout, torch.arange(layout.numel).to(dtype) + 10 * number)
        for number, (layout, dtype) in enumerate(zip(BUCKETS[:2], dtypes, strict=True))
    ]
    message = Message.joined(held)
    assert message.dtypes() == list(dict.fromkeys(dtypes))
    before = [each.bucket.clone() for each in held]
    scratch, sent = Scratch(), []
    for parts in message.parts():
        with packed(parts, scratch) as buffer:
            sent += buffer.tolist()
            buffer.mul_(2)
    assert sent == torch.cat([each.float() for each in before]).tolist()
    assert all(torch.equal(each.bucket, 2 * old) for each, old in zip(held, before, strict=True))


def test_one_bucket_is_not_copied() -> None:
    held = Held(0, BUCKETS[0], torch.zeros(6))
    ((part,),) = Message.joined([held]).parts()
    with packed([part], Scratch()) as buffer:
        assert buffer.data_ptr() == held.bucket.data_ptr()
