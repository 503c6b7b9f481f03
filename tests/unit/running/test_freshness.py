"""Whether a template notices that files which it has imported have changed."""

import os
import sys
from types import ModuleType

import pytest

from shmload._templates.imports import Freshness


@pytest.fixture
def module(monkeypatch, tmp_path):
    """Return what has a name be that of an imported module, and gives its file."""

    def make(name):
        path = tmp_path / "module.py"
        path.touch()
        found = ModuleType(name)
        found.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, found)
        return path

    return make


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_change_under_another_name_is_noticed(module, tmp_path, link, is_replaced):
    path, target = module("some_module"), tmp_path / "store" / "file"
    target.parent.mkdir()
    path.rename(target)
    link(target, path)
    freshness = Freshness()
    freshness.begin()
    assert freshness._is_watching
    assert not freshness.is_lost()
    if is_replaced and link is os.symlink:
        (tmp_path / "store" / "new").write_text("value = 2")
        os.replace(tmp_path / "store" / "new", target)
    else:
        target.write_text("value = 2")
    assert freshness.is_lost()


@pytest.mark.parametrize("is_watched", [True, False])
def test_module_of_another_size_under_its_old_time_is_noticed(module, monkeypatch, is_watched):
    if not is_watched:
        monkeypatch.setattr("shmload._templates.imports._LOCAL", set())
    path = module("some_module")
    freshness = Freshness()
    freshness.begin()
    found = path.stat()
    path.write_text("value = 2")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # as `cp -p` and `rsync -a` do
    assert freshness.is_lost()
