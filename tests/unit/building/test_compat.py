"""The private names of the libraries are where shmload looks; if one moves, this names it."""

import functools
import importlib
import inspect

import pytest
import transformers

from shmload._building import compat, state

pytestmark = pytest.mark.libraries

# What came with transformers 5.
_NEW = ("transformers.conversion_mapping", "transformers.core_model_loading")


@pytest.mark.parametrize("where", compat.NAMES)
def test_name_is_there(where):
    if where.startswith(_NEW) and transformers.__version__ < "5":
        pytest.skip("an older transformers")
    home, _, path = where.partition(":")
    *above, name = path.split(".")
    holder = functools.reduce(getattr, above, importlib.import_module(home))
    # Attributes that a constructor sets, and inner functions, are in the code alone.
    assert hasattr(holder, name) or name in inspect.getsource(holder), compat.NAMES[where]


def test_mode_whose_name_has_moved_is_another_each_time(monkeypatch):
    monkeypatch.setitem(state.MODES, "flash attention", compat.reader("_no_such_mode"))
    assert state.other_mode(state.modes()) == "flash attention"


def test_package_that_does_not_tell_its_names_counts_as_replaced(monkeypatch):
    import diffusers

    assert state.replaced_name() is None
    monkeypatch.delitem(vars(diffusers), "_class_to_module")
    assert state.replaced_name() == "diffusers"


@pytest.mark.parametrize("where", ["no_such_module:name", "torch:_no_such_name"])
def test_name_that_has_moved_is_none(where):
    assert compat.find(where) is None
