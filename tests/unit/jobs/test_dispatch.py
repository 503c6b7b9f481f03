"""Every item comes out exactly once, whichever processes end, and few items are held."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmload
from shmload._jobs.dispatch import ATTEMPTS, Dispatch, Item


def numbered(count):
    return (Item(index, f"value {index}") for index in range(count))


def dispatch(count, *, window=100, is_ordered=True):
    return Dispatch(numbered(count), window=window, is_ordered=is_ordered)


def values(found):
    return [(outcome.number, outcome.value) for outcome in found.come_out()]


def test_runner_gets_as_many_items_as_are_enough():
    found = dispatch(10)
    assert found.give(7).number == 0
    assert found.give(7) is None
    assert found.give(7, 2).number == 1
    assert found.give(7, 2) is None
    found.answer(7, "a")
    assert found.give(7, 2).number == 2
    assert [item.number for item in found.given(7)] == [1, 2]


def test_results_come_out_in_order():
    found = dispatch(3)
    for runner in (1, 2, 3):
        found.give(runner)
    found.answer(2, "b")
    found.answer(3, "c")
    assert values(found) == []
    found.answer(1, "a")
    assert values(found) == [(0, "a"), (1, "b"), (2, "c")]


def test_results_come_out_as_they_are_there():
    found = dispatch(3, is_ordered=False)
    for runner in (1, 2, 3):
        found.give(runner)
    found.answer(2, "b")
    assert values(found) == [(1, "b")]


def test_no_more_than_a_window_is_taken():
    taken = []
    source = (taken.append(item.number) or item for item in numbered(10))
    found = Dispatch(source, window=3, is_ordered=True)
    assert [found.give(1).number, found.give(1, 2).number, found.give(2).number] == [0, 1, 2]
    assert found.give(2, 2) is None
    found.answer(2, "c")
    assert found.give(2, 2) is None  # its result has not come out
    found.answer(1, "a")
    assert values(found) == [(0, "a")]
    assert found.give(2, 2).number == 3
    assert taken == [0, 1, 2, 3]


def test_what_a_runner_had_is_done_again_first():
    found = dispatch(10)
    assert [found.give(1, 2).number, found.give(1, 2).number, found.give(2).number] == [0, 1, 2]
    found.end(1, "SIGKILL")
    assert [found.give(3, 2).number, found.give(3, 2).number, found.give(2, 2).number] == [0, 1, 3]


def test_item_at_which_too_many_end_is_passed_over():
    found = dispatch(2)
    for _ in range(ATTEMPTS):
        assert found.give(1).number == 0
        assert found.give(1, 2).number == 1
        found.end(1, "SIGSEGV")
    assert found.give(1).number == 1
    ((index, error),) = values(found)
    assert index == 0
    assert isinstance(error, shmload.ItemKilled)
    assert (error.item, error.endings) == ("value 0", ("SIGSEGV",) * ATTEMPTS)
    found.answer(1, "b")
    assert values(found) == [(1, "b")]
    assert found.give(1) is None
    assert found.is_over


def test_end_that_is_no_fault_of_an_item_is_not_counted():
    found = dispatch(1)
    for _ in range(10):
        found.give(1)
        found.end(1, None)
    found.give(1)
    found.answer(1, "a")
    assert values(found) == [(0, "a")]


def test_end_of_an_idle_runner_changes_nothing():
    found = dispatch(1)
    found.end(5, "exit code 0")
    assert found.give(1).number == 0


def test_nothing_to_do_is_over_when_that_is_known():
    found = dispatch(0)
    assert found.give(1) is None
    assert found.is_over


@given(
    count=st.integers(0, 30),
    window=st.integers(1, 12),
    is_ordered=st.booleans(),
    runners=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_every_item_comes_out_once(count, window, is_ordered, runners, random):
    found = dispatch(count, window=window, is_ordered=is_ordered)
    came, deaths = [], Counter()
    for _ in range(10_000):
        if found.is_over:
            break
        runner = random.randrange(runners)
        while found.give(runner, random.choice([1, 2])):
            pass
        match random.choice(["answer", "answer", "end", "innocent"]):
            case "answer" if found.given(runner):
                found.answer(runner, found.given(runner)[0].value)
            case "end":
                if found.given(runner):
                    deaths[found.given(runner)[0].number] += 1
                found.end(runner, "SIGKILL")
            case "innocent":
                found.end(runner, None)
        came += found.come_out()
    assert found.is_over
    indexes = [outcome.number for outcome in came]
    assert sorted(indexes) == list(range(count))
    if is_ordered:
        assert indexes == sorted(indexes)
    for outcome in came:
        is_killed = isinstance(outcome.value, shmload.ItemKilled)
        assert is_killed == (deaths[outcome.number] == ATTEMPTS)
        assert is_killed or outcome.value == f"value {outcome.number}"


@pytest.mark.parametrize("is_ordered", [True, False])
def test_items_that_raise_end_there(is_ordered):
    def failing():
        yield Item(0, "a")
        raise OSError("the list ends here")

    found = Dispatch(failing(), window=9, is_ordered=is_ordered)
    assert found.give(1).number == 0
    assert found.give(1, 2) is None
    assert not found.is_over
    found.answer(1, "a")
    assert values(found) == [(0, "a")]
    assert found.is_over
    assert "ends here" in str(found.error)


def test_look_takes_the_first_item_and_no_more():
    taken = []
    found = Dispatch(
        (taken.append(item.number) or item for item in numbered(3)), window=9, is_ordered=True
    )
    found.look()
    assert taken == [0]
    assert [found.give(1).number, found.give(2).number] == [0, 1]
    nothing = dispatch(0)
    nothing.look()
    assert nothing.is_over


def test_item_that_was_not_handed_over_is_over():
    found = dispatch(3)
    assert [found.give(1).number, found.give(1, 2).number] == [0, 1]
    found.take_back(1, "cannot cross")
    assert [item.number for item in found.given(1)] == [0]
    found.answer(1, "a")
    assert values(found) == [(0, "a"), (1, "cannot cross")]
