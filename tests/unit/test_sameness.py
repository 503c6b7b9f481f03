"""The comparison that judges restored pipelines sees each kind of difference, and only those."""

import collections
import copy
import functools
import itertools
import math
import re
import threading
import types
import weakref
from datetime import date
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from sameness import differences
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Text(str):
    pass


class Items(dict):
    pass


class Date(date):
    pass


def closing_over(value, default=0):
    def function(argument=default):
        return value, argument

    return function


def annotated(kind):
    def function(argument: kind):
        return argument

    return function


def with_attribute(made, value):
    made.attribute = value
    return made


def tensor(*values, **options):
    return torch.tensor(values, **options)


def tokenizer(token):
    made = Tokenizer(BPE({"a": 0, "b": 1}, []))
    made.add_tokens([token])
    return made


def halves(*, are_of_one):
    whole = torch.arange(6.0)
    first, second = whole[:4], whole[2:]
    return [first, second if are_of_one else second.clone()]


def twice(*, is_one):
    part = [1]
    return [part, part if is_one else [1]]


_PAIRS = {
    "type": (lambda: 1, lambda: 1.0),
    "subclass": (lambda: {}, lambda: Items()),
    "text": (lambda: "a", lambda: "b"),
    "truth": (lambda: [True], lambda: [1]),
    "zero": (lambda: 0.0, lambda: -0.0),
    "range": (lambda: range(3), lambda: range(4)),
    "slice": (lambda: slice(3), lambda: slice(4)),
    "pattern": (lambda: re.compile("a"), lambda: re.compile("a", re.IGNORECASE)),
    "path": (lambda: PurePosixPath("a"), lambda: PurePosixPath("b")),
    "attribute": (lambda: Thing(a=1), lambda: Thing(a=2)),
    "missing attribute": (lambda: Thing(a=1), lambda: Thing(a=1, b=2)),
    "order of attributes": (lambda: Thing(a=1, b=2), lambda: Thing(b=2, a=1)),
    "slot": (lambda: Slotted(1), lambda: Slotted(2)),
    "attribute of a text": (
        lambda: with_attribute(Text("a"), 1),
        lambda: with_attribute(Text("a"), 2),
    ),
    "attribute of a dict": (
        lambda: with_attribute(Items(a=1), 1),
        lambda: with_attribute(Items(a=1), 2),
    ),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}),
    "key of a dict": (lambda: {Slotted(1): 1}, lambda: {Slotted(2): 1}),
    "default of a dict": (
        lambda: collections.defaultdict(int),
        lambda: collections.defaultdict(list),
    ),
    "view of a dict": (
        lambda: types.MappingProxyType({"a": 1}),
        lambda: types.MappingProxyType({"a": 2}),
    ),
    "list": (lambda: [1, 2], lambda: [1, 3]),
    "length": (lambda: (1, 2), lambda: (1,)),
    "set": (lambda: {1, 2}, lambda: {1, 3}),
    "deque": (lambda: collections.deque([1], 2), lambda: collections.deque([1], 3)),
    "function": (lambda: closing_over(1), lambda: closing_over(2)),
    "default": (lambda: closing_over(1, 2), lambda: closing_over(1, 3)),
    "annotation": (lambda: annotated(int), lambda: annotated(str)),
    "method": (lambda: Slotted(1).__init__, lambda: Slotted(2).__init__),
    "built-in method": (lambda: [1].append, lambda: [2].append),
    "partial": (lambda: functools.partial(print, 1), lambda: functools.partial(print, 2)),
    "count": (lambda: itertools.count(1), lambda: itertools.count(2)),
    "class": (lambda: Slotted, lambda: Thing),
    "sentinel": (object, object),
    "class in C": (lambda: date(2026, 1, 1), lambda: date(2026, 1, 2)),
    "class over one in C": (lambda: Date(2026, 1, 1), lambda: Date(2026, 1, 2)),
    "error": (lambda: ValueError("a"), lambda: ValueError("b")),
    "unseen state": (lambda: iter([1]), lambda: iter([2])),
    "array": (lambda: np.arange(3), lambda: np.arange(4)),
    "element": (lambda: np.array([1, 2]), lambda: np.array([1, 3])),
    "order in memory": (lambda: np.ones((2, 3)), lambda: np.ones((3, 2)).T),
    "writable array": (lambda: np.arange(3), lambda: np.frombuffer(np.arange(3).tobytes(), int)),
    "scalar": (lambda: np.float32(1), lambda: np.float32(2)),
    "object in an array": (
        lambda: np.array([Slotted(1)], dtype=object),
        lambda: np.array([Slotted(2)], dtype=object),
    ),
    "value": (lambda: tensor(1.0), lambda: tensor(2.0)),
    "sign": (lambda: tensor(0.0), lambda: tensor(-0.0)),
    "dtype": (lambda: tensor(1.0), lambda: tensor(1.0, dtype=torch.float64)),
    "shape": (lambda: torch.ones(2, 3), lambda: torch.ones(3, 2)),
    "strides": (lambda: torch.ones(2, 3), lambda: torch.ones(3, 2).T),
    "gradients": (lambda: tensor(1.0), lambda: tensor(1.0, requires_grad=True)),
    "parameter": (
        lambda: torch.nn.Parameter(tensor(1.0), requires_grad=False),
        lambda: tensor(1.0),
    ),
    "attribute of a tensor": (
        lambda: with_attribute(tensor(1.0), 1),
        lambda: with_attribute(tensor(1.0), 2),
    ),
    "generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda: torch.Generator().manual_seed(2),
    ),
    "hook": (
        lambda: torch.nn.Linear(1, 1, device="meta"),
        lambda: with_hook(torch.nn.Linear(1, 1, device="meta")),
    ),
    "token": (lambda: AddedToken("a"), lambda: AddedToken("a", lstrip=True)),
    "tokenizer": (
        lambda: tokenizer(AddedToken("c")),
        lambda: tokenizer(AddedToken("c", normalized=False)),
    ),
    "piece of a tokenizer": (
        lambda: normalizers.Replace("a", "b"),
        lambda: normalizers.Replace("a", "c"),
    ),
    "setting of a piece": (
        lambda: pre_tokenizers.Digits(individual_digits=True),
        lambda: pre_tokenizers.Digits(individual_digits=False),
    ),
    "shared part": (lambda: twice(is_one=True), lambda: twice(is_one=False)),
    "part shared on the other side": (lambda: twice(is_one=False), lambda: twice(is_one=True)),
    "shared memory": (lambda: halves(are_of_one=True), lambda: halves(are_of_one=False)),
}


def with_hook(module):
    module._forward_hooks[0] = print  # torch gives each hook another number
    return module


@pytest.mark.parametrize("pair", _PAIRS)
def test_difference_is_seen(pair):
    one, other = (make() for make in _PAIRS[pair])
    assert differences(one, other)
    assert differences(Thing(part=[one]), Thing(part=[other]))


# Nothing tells whether two iterators or sentinels that are not the same object are alike.
@pytest.mark.parametrize("pair", [each for each in _PAIRS if each not in ("sentinel",)])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_made_twice_is_equal(pair, side):
    make = _PAIRS[pair][side]
    assert not differences([make()], [make()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: math.nan,
        lambda: tensor(math.nan),
        lambda: threading.Lock(),
        lambda: [Thing(a=1), weakref.ref(Thing)],
        lambda: torch.nn.Sequential(torch.nn.Linear(1, 1, device="meta")),
    ],
)
def test_equal_things(make):
    assert not differences(make(), make())


def test_what_cannot_be_compared_is_a_difference():
    assert differences(memoryview(b"a"), memoryview(b"a")) == [
        "it is a memoryview, which cannot be compared"
    ]


def test_a_copy_of_a_model_is_equal_until_a_weight_changes():
    model = torch.nn.TransformerEncoderLayer(8, 2, 8)
    other = copy.deepcopy(model)
    assert not differences(model, other)
    other.linear1.weight.data[0, 0] += 1
    assert differences(model, other) == [
        "it._modules.linear1._parameters.weight has other elements"
    ]
