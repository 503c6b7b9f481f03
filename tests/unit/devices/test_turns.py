"""Buffers take turns, none that is in use is taken, and the order of blocks is learnt."""

import pytest

from shmload._devices.block import Turns


def use(turns, *blocks, caller="a thread"):
    """Use some blocks one after the other; returns the buffer of each."""
    taken = []
    for block in blocks:
        buffer = turns.find_or_take(block)
        turns.enter(buffer)
        turns.follow(block, caller)
        turns.leave(buffer)
        taken.append(buffer)
    return taken


def test_blocks_take_turns():
    assert use(Turns(2), 1, 2, 3, 4, 1) == [0, 1, 0, 1, 0]


def test_block_that_a_buffer_holds_keeps_it():
    assert use(Turns(2), 1, 2, 1, 3, 1) == [0, 1, 0, 1, 0]


def test_buffer_in_use_is_not_taken():
    turns = Turns(2)
    first = turns.take(1)
    turns.enter(first)
    assert [turns.take(2), turns.take(3)] == [1, 1]
    turns.enter(1)
    assert turns.take(4) is None
    turns.leave(first)
    assert turns.take(4) == first
    assert turns.find(1) is None


def test_buffer_with_two_users_is_free_after_both():
    turns = Turns(1)
    for _ in range(2):
        turns.enter(0)
    turns.leave(0)
    assert turns.take(1) is None
    turns.leave(0)
    assert turns.take(1) == 0


def test_dropped_block_is_filled_anew():
    turns = Turns(2)
    turns.take(1)
    turns.drop(1)
    assert turns.find(1) is None


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        ([1, 2, 3], {1: 2, 2: 3, 3: None}),
        ([1, 2, 3, 1], {1: 2, 2: 3, 3: 1}),
        ([1, 2, 1, 3], {1: 3, 2: 1, 3: None}),  # the last time counts
        ([1, 1, 2, 2], {1: 2, 2: None}),  # called twice in a row
    ],
)
def test_order_is_learnt_from_the_last_time(seen, wanted):
    turns = Turns(2)
    use(turns, *seen)
    assert {block: turns.follow(block, f"caller {block}") for block in wanted} == wanted


def test_assumed_order_holds_until_another_is_seen():
    turns = Turns(2)
    turns.expect(1, 2)
    assert turns.follow(1, "a") == 2
    turns.follow(3, "a")
    turns.expect(1, 2)
    assert turns.follow(1, "b") == 3


def test_callers_have_orders_of_their_own():
    turns = Turns(2)
    for one, other in ((1, 7), (2, 8), (3, 9)):
        turns.follow(one, "one")
        turns.follow(other, "other")
    assert turns.follow(1, "one") == 2
    assert turns.follow(7, "other") == 8


def test_block_that_is_gone_is_forgotten():
    turns = Turns(2)
    use(turns, 1, 2, 1)
    turns.forget(2)
    assert turns.find(2) is None
    assert turns.follow(1, "a") is None
    use(turns, 2, caller="a")
    assert turns.follow(1, "b") == 2
