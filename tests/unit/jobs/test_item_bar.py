"""Without a terminal a long job says now and then how far it is."""

import sys

import pytest

from shmload._jobs import item_bar
from shmload._jobs.item_bar import ItemBar


@pytest.fixture
def clock(monkeypatch):
    """Time as the bar sees it: a list with the present second."""
    now = [1000.0]
    monkeypatch.setattr(item_bar.time, "monotonic", lambda: now[0])
    return now


def test_line_comes_now_and_then_and_tells_the_rate_of_this_run(clock, capsys):
    with ItemBar(range(1000), None) as bar:
        for _ in range(400):
            bar.skip()
        for _ in range(99):
            clock[0] += 1
            bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "shmload: 410 of 1,000 items (41%), 1 items/s, 9 min left",
        "shmload: 470 of 1,000 items (47%), 1 items/s, 8 min left",
    ]


def test_number_of_items_need_not_be_known(clock, capsys):
    with ItemBar(iter("abc"), None) as bar:
        clock[0] += 20
        bar.update()
        clock[0] += 70
        bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "shmload: 1 item",
        "shmload: 2 items, 0.014 items/s",
    ]


@pytest.mark.parametrize("progress", [False, None])
def test_nothing_is_said_of_a_quick_job_or_on_request(clock, capsys, progress):
    with ItemBar(range(3), progress) as bar:
        clock[0] += 20 if progress is False else 5
        bar.update()
    assert capsys.readouterr().err == ""


def test_closed_stderr_harms_nothing(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with ItemBar(range(3), None) as bar:
        clock[0] += 20
        bar.update()


def test_start_that_takes_long_is_said_once(clock, capsys):
    with ItemBar(range(100), None) as bar:
        for _ in range(40):
            clock[0] += 1
            bar.wait(is_started=False)
    assert capsys.readouterr().err == (
        "shmload: starting: the libraries are imported and the weights loaded\n"
    )


def test_rate_comes_soon_after_a_line_without_one(clock, capsys):
    with ItemBar(range(100), None) as bar:
        for _ in range(3):
            clock[0] += 7
            bar.wait(is_started=True)
            bar.update()
            clock[0] += 7
            bar.wait(is_started=True)
    assert capsys.readouterr().err.splitlines() == [
        "shmload: 1 of 100 items (1%)",
        "shmload: 2 of 100 items (2%), 0.048 items/s, 34 min left",
    ]


def test_long_wait_for_an_item_is_said(clock, capsys):
    with ItemBar(range(100), None) as bar:
        clock[0] += 5
        bar.update()
        clock[0] += 100
        bar.wait(is_started=True)
    assert capsys.readouterr().err == "shmload: 1 of 100 items (1%)\n"
