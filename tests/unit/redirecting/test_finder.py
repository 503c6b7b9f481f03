"""The finder notices the import of a module, and leaves no trace in it."""

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader

import pytest

from shmload._redirecting.patches import Finder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with two modules, importable during the test."""
    folder = tmp_path / "finderlib"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "wanted.py").write_text("VALUE = 1\n")
    (folder / "other.py").write_text("from finderlib import wanted\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "finderlib"]:
        del sys.modules[name]


@pytest.fixture
def loaded(monkeypatch):
    """The modules that the finder has noticed."""
    found = []
    finder = Finder(["finderlib.wanted"], found.append)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return found


@pytest.mark.usefixtures("package")
def test_module_is_given_once_it_is_executed(loaded):
    import finderlib.other

    assert [module.VALUE for module in loaded] == [1]
    assert loaded[0] is finderlib.other.wanted


@pytest.mark.usefixtures("package")
def test_module_has_its_own_loader(loaded):
    module = importlib.import_module("finderlib.wanted")
    assert type(module.__loader__) is SourceFileLoader
    assert module.__spec__.loader is module.__loader__
    assert module.__spec__.origin == module.__file__
    assert module.__cached__


@pytest.mark.usefixtures("package")
def test_looking_for_a_module_does_not_import_it(loaded):
    spec = importlib.util.find_spec("finderlib.wanted")
    assert "finderlib.wanted" not in sys.modules
    assert loaded == []
    assert "VALUE" in spec.loader.get_source("finderlib.wanted")


@pytest.mark.usefixtures("loaded")
def test_missing_module_is_missing():
    with pytest.raises(ModuleNotFoundError, match="finderlib"):
        importlib.import_module("finderlib.wanted")


def test_module_that_fails_is_not_given(package, loaded):
    (package / "wanted.py").write_text("raise ValueError('broken')\n")
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("finderlib.wanted")
    assert loaded == []
    assert "finderlib.wanted" not in sys.modules
