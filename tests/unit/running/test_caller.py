"""How a program reaches a template."""

import warnings

import pytest

from shmload._templates import caller


def test_missing_template_leaves_no_socket_open(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(caller.Doubt):
            caller._connect("key")
    assert said == []
