"""Times are written so that nothing seems shorter or longer by an hour."""

import re
from pathlib import Path

import pytest

from shmload._wording import format_time, logger_of


@pytest.mark.parametrize(
    ("left_s", "text"),
    [
        (-1, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (7199, "1 h 59 min"),
        (7200, "2 h"),
        (47 * 3600 + 60, "47 h 1 min"),
        (50 * 3600, "2 days 2 h"),
        (2 * 86400 + 60, "2 days 1 min"),
    ],
)
def test_time_has_one_or_two_units(left_s, text):
    assert format_time(left_s) == text


_SOURCES = [
    path
    for folder in ("shmload", "integrations", "workers")
    for path in sorted((Path(__file__).parents[2] / folder).rglob("*.py"))
    if "_templates" not in path.parts
]


def test_every_logger_escapes_what_does_not_print():
    """A logger of the package that is made in another way lets a file's name steer a terminal."""
    made = {path for path in _SOURCES if re.search(r"^logger = ", path.read_text(), re.M)}
    escaping = {path for path in made if "\nlogger = logger_of(" in path.read_text()}
    assert len(escaping) > 10
    assert made == escaping


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("%s is left, %d B", ("a\x1b[2J\nb\udce9", 3)),
        ("%s is left, 3 B", (Path("a\x1b[2J\nb\udce9"),)),
        ("a\x1b[2J\nb\udce9 is left, 3 B", ()),
    ],
)
def test_line_of_a_log_is_one_that_prints(text, arguments, caplog):
    logger = logger_of("shmload.test")
    assert logger_of("shmload.test") is logger
    assert len(logger.filters) == 1
    logger.warning(text, *arguments)
    assert caplog.messages == [r"a\x1b[2J\nb\udce9 is left, 3 B"]
