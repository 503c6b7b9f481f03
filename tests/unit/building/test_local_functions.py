"""Functions that constructors define inside themselves are pickled by where their code is."""

import functools
import types

import pytest
import torch
from sameness import differences

from shmload._building import local_functions, structure, tensor_parts


class Model(torch.nn.Module):
    def __init__(self, size=2):
        super().__init__()
        factor = size

        def scaled(x: int, offset=1, *, power=size) -> int:
            """Scale a number."""
            return x**power * factor + offset

        def inner():
            return lambda x: self.size * x

        def counted():
            nonlocal factor
            factor += 1

        scaled.note = "a note"
        self.size = size
        self.plain = lambda x: x + 1
        self.other = lambda x: x + 2
        self.scaled = scaled
        self.deep = inner()
        self.counted = counted


class Wrapped(torch.nn.Module):
    def _wrapping(function):
        @functools.wraps(function)
        def wrapper(*args):
            function(*args)

        return wrapper

    @_wrapping
    def __init__(self):
        super().__init__()
        self.negative = lambda x: -x


def comes_back(thing):
    return structure.put_together(structure.take_apart(thing).structure, None)


def test_restored_functions_are_equal():
    made = Model(3)
    got = comes_back(made)
    assert not differences(got, made)
    for name in ("plain", "other", "scaled", "deep"):
        assert getattr(got, name)(5) == getattr(made, name)(5)


def test_functions_share_their_variables_again_with_each_other_alone():
    made = Model(3)
    got = comes_back(made)
    got.counted()
    assert got.scaled(1) == 5
    assert made.scaled(1) == 4
    got.size = 7
    assert got.deep(1) == 7


def test_decorated_constructor():
    assert comes_back(Wrapped()).negative(2) == -2


def test_empty_variable_stays_empty():
    got = local_functions.make_cell(*local_functions.content_of(types.CellType()))
    with pytest.raises(ValueError, match="empty"):
        _ = got.cell_contents


def outside():
    return lambda x: x


class Local:
    def method(self):
        return lambda x: x


@pytest.mark.parametrize("make", [outside, Local().method])
def test_other_local_functions_are_refused(make):
    model = torch.nn.Linear(1, 1)
    model.function = make()
    with pytest.raises(tensor_parts.CannotKeep, match=r"function: Can't .* local object"):
        structure.take_apart(model)


def test_function_of_a_constructor_that_was_replaced_is_refused(monkeypatch):
    made = Model()
    monkeypatch.setattr(Model, "__init__", lambda self: None)
    with pytest.raises(tensor_parts.CannotKeep, match=r"Can't .* local object"):
        structure.take_apart(made)


def test_other_code_in_its_place_is_not_taken(monkeypatch):
    apart = structure.take_apart(Model())

    def __init__(self):
        self.plain = lambda x: x * 3

    __init__.__qualname__ = "Model.__init__"
    monkeypatch.setattr(Model, "__init__", __init__)
    with pytest.raises(ValueError, match=r"Model.__init__ has other code here"):
        structure.put_together(apart.structure, None)
