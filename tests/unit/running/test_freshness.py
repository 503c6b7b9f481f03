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


def write_until_later(path, freshness):
    """Change a file until its time shows it: the kernel's clock for files has ticks."""
    while not path.exists() or path.stat().st_ctime_ns <= freshness._since_ns:
        path.write_text("value = 2")


def test_further_link_while_modules_are_imported_is_no_change(module, tmp_path):
    path = module("some_module")
    freshness = Freshness()
    while path.stat().st_ctime_ns <= freshness._since_ns:
        (tmp_path / "further").unlink(missing_ok=True)
        os.link(path, tmp_path / "further")
    freshness.begin()
    assert not freshness.is_lost()


def test_what_changes_while_modules_are_imported_is_noticed(module):
    freshness = Freshness()
    write_until_later(module("some_module"), freshness)
    freshness.begin()
    assert freshness.is_lost()


def test_package_that_is_installed_while_modules_are_imported_is_noticed(monkeypatch, tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [str(packages)])
    freshness = Freshness()
    (packages / "__pycache__").mkdir()  # Python makes this one itself
    freshness.begin()
    assert not freshness.is_lost()
    (packages / "extra").mkdir()
    freshness.begin()
    assert freshness.is_lost()


def test_change_before_further_imports_is_not_forgotten(module):
    path = module("some_module")
    freshness = Freshness()
    freshness.begin()
    path.write_text("value = 2")
    freshness.begin()
    assert freshness.is_lost()


@pytest.fixture
def two(monkeypatch, tmp_path):
    """Two directories with a module each; the first is on the path, below a link."""
    for name in ("one", "two"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / "module.py").write_text(f"value = '{name}'")
    (tmp_path / "link").symlink_to("one")
    path = tmp_path / "link" / "lib"
    monkeypatch.setattr(sys, "path", [str(path)])
    found = ModuleType("module")
    found.__file__ = f"{path}/module.py"
    monkeypatch.setitem(sys.modules, "module", found)
    return tmp_path


_EXCHANGED = {
    "a link": lambda at: (os.symlink("two", at / "new"), os.replace(at / "new", at / "link")),
    "a folder above": lambda at: (
        os.rename(at / "one", at / "old"),
        (at / "two").rename(at / "one"),
    ),
}


@pytest.mark.parametrize("what", _EXCHANGED)
def test_exchanged_place_above_a_folder_on_the_path_is_noticed(two, what):
    freshness = Freshness()
    freshness.begin()
    assert freshness._is_watching
    assert not freshness.is_lost()
    _EXCHANGED[what](two)
    assert freshness.is_lost()


def test_changed_archive_on_the_path_is_noticed(monkeypatch, tmp_path):
    archive = tmp_path / "modules.zip"
    archive.write_bytes(b"one")
    monkeypatch.setattr(sys, "path", [str(archive)])
    freshness = Freshness()
    freshness.begin()
    assert not freshness.is_lost()
    archive.write_bytes(b"another")
    assert freshness.is_lost()
