"""An error lets go of the locals that it passed through, and of no others."""

import sys
import weakref

import pytest

from shmload._host.collector import forget_locals


class Thing:
    pass


def fail(seen, error):
    thing = Thing()
    seen.append(weakref.ref(thing))
    raise error


def fail_with_cause(seen):
    try:
        fail(seen, KeyError())
    except KeyError as exc:
        raise ValueError from exc


def fail_while_another_is_handled(seen):
    try:
        fail(seen, KeyError())
    except KeyError:
        fail(seen, ValueError())


def fail_in_a_group(seen):
    found = []
    for _ in range(2):
        try:
            fail(seen, KeyError())
        except KeyError as exc:
            found.append(exc)
    raise ExceptionGroup("both", found)


@pytest.mark.parametrize("fails", [fail_with_cause, fail_while_another_is_handled, fail_in_a_group])
def test_nothing_is_kept(fails):
    seen = []
    try:
        fails(seen)
    except Exception as exc:
        kept = exc
    assert None not in [thing() for thing in seen]
    forget_locals(kept, None)
    assert {thing() for thing in seen} == {None}
    assert kept.__traceback__


def test_error_from_before_keeps_its_own():
    seen = []
    try:
        fail(seen, KeyError())
    except KeyError:
        before = sys.exception()
        try:
            fail(seen, ValueError())
        except ValueError as exc:
            kept = exc
        forget_locals(kept, before)
        assert seen[0]() is not None
        assert seen[1]() is None
