"""Jumps of the wall clock do no harm: deadlines are monotonic, file times only compared."""

import itertools
import os
import time

import pytest
import torch
from safetensors.torch import load_file
from warming import CHILD, SHM, begun

import shmload
from shmload._segments.names import name_prefix

YEAR_S = 365 * 86400


@pytest.fixture
def jumping_clock(monkeypatch):
    """Let this process's wall clock jump ten years forward and back at each call."""
    real, jumps = time.time, itertools.cycle([10 * YEAR_S, 0, -10 * YEAR_S, 0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


@pytest.mark.usefixtures("jumping_clock")
def test_load_takes_no_jump_for_a_stall(large, configure, caplog, evicts):
    configure(inline_nbytes=0, workers=2, stall_timeout_s=60, start_timeout_s=60)
    got = shmload.load_state_dict(large, torch.bfloat16, keep=True, verify=True)
    assert torch.equal(got["a"], load_file(large)["a"].bfloat16())
    assert caplog.messages == []
    assert [info.is_leased for info in shmload.segments()] == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("jumping_clock")
def test_wait_for_another_process_ends_by_the_monotonic_clock(checkpoint, child, configure, evicts):
    other = child(CHILD, "warm", checkpoint)
    begun(other)
    other.expect("AT")
    configure(wait_timeout_s=0.2)
    began = time.monotonic()
    with pytest.raises(shmload.SegmentTimeout):
        shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert time.monotonic() - began >= 0.2
    other.say()
    (name,) = other.expect("READ").split()[1:]
    assert shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments == (name,)


@pytest.mark.parametrize("age_s", [10 * YEAR_S, -10 * YEAR_S], ids=["past", "future"])
def test_view_in_use_is_no_garbage_whatever_its_age(checkpoint, age_s):
    with shmload.view(checkpoint, torch_dtype=torch.bfloat16) as path:
        when = time.time() - age_s
        os.utime(path.parent, (when, when))
        assert shmload.collect_garbage() == []
        assert len(load_file(path)) == 2


def test_view_that_never_had_its_lock_is_garbage_once_it_is_old(shm_names):
    # Its process was killed between the two.
    view = SHM / f"{name_prefix()}view-0123456789abcdef"
    view.mkdir(0o700)
    assert shmload.collect_garbage() == []  # young: its process may be about to lock it
    when = time.time() + YEAR_S  # the clock was set back
    os.utime(view, (when, when))
    assert shmload.collect_garbage() == [view.name]
    assert shm_names() == []
