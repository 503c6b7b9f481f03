"""A run whose first items all fail with the same error ends with that error, and with no other."""

import pytest

import shmload
from shmload._jobs.dispatch import Item
from shmload._jobs.storing import MAX_SAME_ERRORS, end_if_all_fail


def failed(index, reason="KeyError: 'x'"):
    return Item(index, shmload.ItemFailed(index, index, reason))


def sift(outcomes, *, has_results=False):
    return list(end_if_all_fail(iter(outcomes), lambda: has_results))


def test_same_error_of_the_first_items_ends_the_run_before_any_comes_out():
    taken = []

    def outcomes():
        for index in range(100):
            taken.append(index)
            yield failed(index)

    with pytest.raises(shmload.JobFailed, match=r"the first 8 items failed .*: KeyError: 'x'\."):
        sift(outcomes())
    assert len(taken) == MAX_SAME_ERRORS


def test_all_of_few_items_are_enough_but_one_is_not():
    with pytest.raises(shmload.JobFailed, match="first 2 items") as caught:
        sift([failed(0), failed(1)])
    assert isinstance(caught.value.__cause__, shmload.ItemFailed)
    assert len(sift([failed(0)])) == 1
    assert sift([]) == []


def test_result_lets_all_out_in_their_order():
    outcomes = [*map(failed, range(7)), Item(7, "a result"), *map(failed, range(8, 30))]
    assert sift(outcomes) == outcomes


def test_broken_items_among_the_first_do_not_hide_the_error_of_all_others():
    outcomes = [
        failed(index, f"broken {index}" if index % 2 else "KeyError") for index in range(99)
    ]
    with pytest.raises(shmload.JobFailed, match=r"8 of the first 15 items failed .* KeyError"):
        sift(outcomes)
    with pytest.raises(shmload.JobFailed, match="2 of the first 3 items"):
        sift(outcomes[:3])


def test_errors_that_differ_come_out():
    outcomes = [failed(index, f"broken {index // 2}") for index in range(99)]
    assert sift(outcomes) == outcomes
    assert sift(outcomes[:6]) == outcomes[:6]


def test_where_results_are_stored_the_items_are_at_fault():
    outcomes = list(map(failed, range(30)))
    assert sift(outcomes, has_results=True) == outcomes
