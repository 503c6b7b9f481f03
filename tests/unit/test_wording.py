"""Times are written so that nothing seems shorter or longer by an hour."""

import pytest

from shmload._wording import format_time


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
