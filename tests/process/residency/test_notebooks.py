"""Errors name what holds weights in a notebook, and what frees them there."""

import gc
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import shmload
from shmload._segments import capacity


@pytest.fixture
def notebook(single_shard, evicts):
    """The variables of a notebook that has loaded a file as `state`; its cells are `exec`."""
    cell = {"__name__": "notebook", "shmload": shmload, "source": single_shard, "Out": {}}
    shell = SimpleNamespace(user_ns_hidden={"_": "", "exit": None})
    cell |= {"get_ipython": lambda: shell, "_": "", "__": "", "___": ""}
    exec("state = shmload.load_state_dict(source, keep=True)", cell)
    yield cell
    cell.clear()
    gc.collect()


@pytest.fixture
def single_shard(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(8)}, path)
    return path


@pytest.mark.parametrize(
    ("cell", "remedy", "variables"),
    [
        ("pass", "`del state`", ("state",)),
        ("Out[3] = _3 = _ = state", "`%xdel state` (a cell has displayed it)", ("state",)),
        ("Out[3] = _3 = _ = state; del state", "`%xdel _3` (a cell has displayed it)", ("_3",)),
        (
            "Out[3] = _3 = __ = state['a']; Out[4] = _4 = _ = 5",
            "`del state` and `%xdel _3` (a cell has displayed it)",
            ("state", "_3"),
        ),
        (
            "class Server: __module__ = '__main__'\nmine = Server(); mine.x = state; del state",
            "`del mine`",
            ("mine",),
        ),
        (
            "get_ipython().user_ns_hidden['_'] = state; del state",
            "`get_ipython().user_ns_hidden.update(_='', __='', ___='')` "
            "(a cell had displayed it before `%reset`)",
            (),
        ),
        ("_ = state; del state", "`%xdel _` (a cell has displayed it)", ("_",)),
    ],
)
def test_what_a_notebook_displays_is_dropped_as_ipython_can(notebook, cell, remedy, variables):
    exec(cell, notebook)
    with pytest.raises(shmload.SegmentBusy) as busy:
        exec("shmload.evict(source)", notebook)
    assert f"in this process {remedy}, then call `gc.collect()`" in str(busy.value)
    assert busy.value.variables == variables


def test_traceback_of_the_last_error_is_named_as_a_holder(notebook, monkeypatch):
    exec("def fail(mine):\n  1 / 0", notebook)
    try:
        exec("fail(shmload.load_state_dict(source))", notebook)
    except ZeroDivisionError as exc:
        monkeypatch.setattr(sys, "last_value", exc, raising=False)
    exec("del state", notebook)
    gc.collect()
    with pytest.raises(shmload.SegmentBusy, match="take the place of the last one") as busy:
        exec("shmload.evict(source)", notebook)
    assert "ZeroDivisionError" in str(busy.value)
    assert busy.value.variables == ()


@pytest.mark.parametrize("keep", [True, False])
def test_lack_of_room_names_the_variables_that_hold_it(
    notebook, single_shard, monkeypatch, tmp_path, keep
):
    other = tmp_path / "b.safetensors"
    save_file({"a": torch.zeros(8)}, other)
    if not keep:
        exec("del state", notebook)
        gc.collect()
        shmload.evict(single_shard)
        exec("state = shmload.load_state_dict(source, 'float16')", notebook)
    monkeypatch.setattr(capacity, "shm_free_nbytes", lambda: 100)
    with pytest.raises(shmload.SharedMemoryFull, match="leaves 100 B; in this process `del state`"):
        exec(f"shmload.load_state_dict({str(other)!r}, keep=True)", notebook)


def test_reports_and_lists_are_shown_as_the_command_line_shows_them(single_shard, evicts):
    report = shmload.warm(single_shard, dtype="float16")
    line = str(report)
    assert line.startswith(f"{single_shard}: 4.02 KiB resident in 1 segment, 32 B read in 0.")
    assert report._repr_html_() == f"<pre>{line}</pre>"
    assert str(shmload.warm(single_shard, dtype="float16")).endswith(": already resident, 4.02 KiB")
    state = shmload.load_state_dict(single_shard, "float16", keep=True)
    assert "in use  now  " in re.sub("  +", "  ", str(shmload.segments()))
    del state
    gc.collect()
    for function in (shmload.pin, shmload.unpin, shmload.verify, shmload.evict):
        assert "<td" in function(single_shard)._repr_html_()
