"""Patches on classes that stand for a library's: in front, undone, beside others' patches."""

import functools
import inspect

import pytest

from shmload._redirecting.patches import Patch


def _library_code(source):
    """Return the class of a module that belongs to a library by its name."""
    names = {"__name__": "diffusers.fake", "functools": functools}
    exec(source, names)
    return names["Base"]


@pytest.fixture
def base():
    return _library_code(
        """
def checked(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

class Base:
    @classmethod
    @checked
    def from_pretrained(cls, path, *, dtype=None, **kwargs):
        "Load it."
        kwargs.pop("variant", None)
        return cls.__name__, path, kwargs
"""
    )


def _route(patch, cls, args, kwargs):
    return "routed", patch.call_original(cls, args, kwargs)


def test_calls_of_the_class_and_of_subclasses_are_routed(base):
    class Sub(base):
        pass

    patch = Patch(base, "pipeline", _route)
    assert base.from_pretrained("a") == ("routed", ("Base", "a", {}))
    assert Sub.from_pretrained("b", x=1) == ("routed", ("Sub", "b", {"x": 1}))
    assert Sub().from_pretrained("c") == ("routed", ("Sub", "c", {}))
    assert patch.answers(base)
    assert patch.answers(Sub)


def test_undo_restores_the_very_attribute(base):
    before = vars(base)["from_pretrained"]
    patch = Patch(base, "pipeline", _route)
    assert vars(base)["from_pretrained"] is not before
    patch.undo()
    assert vars(base)["from_pretrained"] is before
    patch.undo()
    assert vars(base)["from_pretrained"] is before


def test_method_looks_like_the_one_behind_it(base):
    before = base.from_pretrained
    looks = (inspect.signature(before), before.__doc__, before.__name__, before.__qualname__)
    Patch(base, "pipeline", _route)
    after = base.from_pretrained
    assert (inspect.signature(after), after.__doc__, after.__name__, after.__qualname__) == looks
    assert after.__module__ == before.__module__
    assert isinstance(vars(base)["from_pretrained"], classmethod)
    assert inspect.ismethod(after)
    assert inspect.unwrap(after) is inspect.unwrap(before)


def test_patch_of_another_on_top_survives_and_still_works(base):
    patch = Patch(base, "pipeline", _route)
    inner = base.from_pretrained

    def theirs(cls, *args, **kwargs):
        return "theirs", inner(*args, **kwargs)

    base.from_pretrained = classmethod(theirs)
    mine = vars(base)["from_pretrained"]
    assert not patch.answers(base)
    patch.undo()
    assert vars(base)["from_pretrained"] is mine
    assert base.from_pretrained("a") == ("theirs", ("routed", ("Base", "a", {})))


def test_patch_of_another_below_is_noticed_and_restored(base):
    assert Patch(base, "pipeline", _route).is_on_library
    before = vars(base)["from_pretrained"]

    @functools.wraps(before.__func__)
    def theirs(cls, *args, **kwargs):
        return "theirs", before.__get__(None, cls)(*args, **kwargs)

    base.from_pretrained = classmethod(theirs)
    kept = vars(base)["from_pretrained"]
    patch = Patch(base, "pipeline", _route)
    assert not patch.is_on_library
    patch.undo()
    assert vars(base)["from_pretrained"] is kept


def test_method_of_a_subclass_is_noticed(base):
    class Own(base):
        @classmethod
        def from_pretrained(cls, path, **kwargs):
            return "own", super().from_pretrained(path, **kwargs)

    patch = Patch(base, "pipeline", _route)
    assert not patch.answers(Own)
    assert patch.answers(base)
    assert Own.from_pretrained("a") == ("own", ("routed", ("Own", "a", {})))


def test_name_of_the_path_is_that_of_the_innermost_function(base):
    assert Patch(base, "pipeline", _route).path_argument == "path"
