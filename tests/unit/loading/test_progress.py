"""A load shows its progress on a terminal, to a program, or in the log, and counts its time."""

import io
import logging
from types import SimpleNamespace

import pytest

from shmload._loading import progress as module
from shmload._loading.progress import Progress, Step


@pytest.fixture
def stderr(monkeypatch):
    """A stderr that is no terminal."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    return stderr


def test_callback_never_sees_more_than_all():
    seen = []
    with Progress(lambda done, total: seen.append((done, total)), "title") as progress:
        progress.start(10)
        progress.add(6)
        progress.add(6)  # a piece whose worker died is read twice
        progress.start(4)
        progress.add(1)
    assert seen == [(6, 10), (10, 10), (1, 4)]


@pytest.mark.parametrize(
    ("report", "is_terminal", "has_bar"),
    [
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ],
)
def test_bar_is_shown_on_a_terminal_or_on_request(monkeypatch, report, is_terminal, has_bar):
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", stderr)
    with Progress(report, "model") as progress:
        progress.start(100)
        progress.add(100)
    assert ("model" in stderr.getvalue()) == has_bar


def test_without_terminal_long_work_writes_a_line_now_and_then(monkeypatch, stderr, caplog):
    caplog.set_level(logging.INFO, "shmload.progress")
    times = iter((99.0, 99.0, 100.0, 101.0, 111.0, 111.0, 112.0, 133.0, 133.0))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with Progress(None, "flux") as progress:
        with progress.during(Step.IMPORTING, "importing"):
            pass
        progress.start(4 << 20)
        for _ in range(4):
            progress.add(1 << 20)
    assert caplog.messages == [
        "flux: importing",
        "flux: 2.00 MiB of 4.00 MiB read in 11 s",
        "flux: 4.00 MiB of 4.00 MiB read in 33 s",
    ]
    assert stderr.getvalue() == ""


@pytest.mark.parametrize("report", [False, lambda done, total: None])
def test_nothing_is_logged_for_who_wants_no_progress(monkeypatch, stderr, caplog, report):
    caplog.set_level(logging.INFO, "shmload.progress")
    monkeypatch.setattr(module, "_LINE_INTERVAL_S", -1)
    with Progress(report, "flux") as progress:
        progress.start(2)
        progress.add(1)
        with progress.during(Step.IMPORTING, "importing"):
            pass
    assert caplog.messages == []


def test_closed_stderr_is_no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Progress(None, "flux") as progress:
        progress.start(2)
        progress.add(2)


def test_time_is_counted_also_of_a_step_that_fails(monkeypatch):
    times = iter([1.0, 3.5, 10.0, 10.04, 20.0, 21.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    progress = Progress(False, "flux")
    with pytest.raises(ZeroDivisionError), progress.during(Step.READING):
        1 / 0  # noqa: B018
    with progress.during(Step.DERIVING_RULES):
        pass
    with progress.during(Step.READING):
        pass
    assert progress.times_s["reading"] == 3.5
    assert module.describe_times(progress.times_s) == "reading 3.5 s"
