"""A load shows its progress on a terminal, to a program, or in the log, and counts its time."""

import io

import pytest

from shmload._loading.progress import Progress


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
        progress.expect(5)  # a part whose builder died is decoded here
        progress.add(8)
    assert seen == [(6, 10), (10, 10), (1, 4), (9, 9)]


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
        progress.start(0)  # another process decodes
        progress.expect(100)
        progress.add(100)
    assert ("model" in stderr.getvalue()) == has_bar
