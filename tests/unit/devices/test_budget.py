"""No more is page-locked than the budget allows, to the byte, and what is over it is said once."""

import logging

from shmload._devices.origin import Budget
from shmload._runtimes.runtime import say_once


def test_bytes_are_taken_up_to_the_limit_and_given_back():
    budget = Budget(100)
    assert budget.take(60)
    assert not budget.take(41)
    assert budget.take(40)
    assert not budget.take(1)
    budget.give_back(60)
    assert budget.taken_nbytes == 40
    assert budget.take(60)


def test_nothing_may_be_taken_of_nothing():
    assert not Budget(0).take(1)


def test_refusal_is_said_once(caplog):
    say_once.cache_clear()
    budget = Budget(100)
    with caplog.at_level(logging.WARNING):
        budget.take(90)
        assert caplog.records == []
        assert [budget.take(20), budget.take(20)] == [False, False]
    (record,) = caplog.records
    assert "no more than 100 B of weights" in record.message
    assert "SHMLOAD_PAGE_LOCKED" in record.message
