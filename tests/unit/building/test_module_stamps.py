"""A library's module that was rewritten is noticed by what was built from its code."""

import importlib
import os
import sys

import pytest

from shmload._building import conditions


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A module of diffusers that a test may change; `forget` acts as a new process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "planted.py"
    path.write_text("VALUE = 1\n")
    planted = importlib.import_module("planted")
    monkeypatch.setitem(sys.modules, "diffusers.planted", planted)
    del sys.modules["planted"]
    yield path
    forget()


def forget():
    conditions._stat.cache_clear()


@pytest.mark.parametrize("text", ["VALUE = 2\n", "VALUE = 10\n"])
def test_module_that_is_rewritten_under_its_old_time_has_another_stamp(module, text):
    forget()
    before, stamp = module.stat(), conditions.stamp_of("diffusers.planted")
    assert stamp is not None
    module.write_text(text)
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` does
    forget()
    assert conditions.stamp_of("diffusers.planted") != stamp
