"""Loads keep to the budget of the running service, and share one copy."""

from pathlib import Path

import pytest
from watching import until

import shmload
from shmload.errors import SharedMemoryFull

_SEGMENT = (1 << 20) + 4096


def resident():
    return {Path(info.source) for info in shmload.segments()}


def test_least_recently_used_goes_first(service, shards):
    service("--budget", str(3 * _SEGMENT))
    for path in shards[:3]:
        shmload.warm(path, dtype="bfloat16")
    shmload.warm(shards[0], dtype="bfloat16")  # its last use is now the newest
    (gone,) = shmload.warm(shards[3], dtype="bfloat16").evicted
    assert (gone.name, gone.dtype) == (shards[1].name, "bfloat16")
    assert resident() == {shards[0], shards[2], shards[3]}


def test_what_goes_with_its_load_needs_no_room_in_the_budget(service, shards, shm_names):
    service("--budget", "0")
    before = shm_names()
    assert shmload.load_state_dict(shards[0], "bfloat16")["weight"].eq(0).all()
    assert shm_names() == before
    with pytest.raises(SharedMemoryFull):
        shmload.warm(shards[0], dtype="bfloat16")


def test_what_exceeds_the_budget_is_refused_before_a_byte_is_read(service, shards):
    service("--budget", str(2 * _SEGMENT))
    state = shmload.load_state_dict(shards[0], "bfloat16", keep=True)
    shmload.warm(shards[1], dtype="bfloat16", pin=True)
    with pytest.raises(SharedMemoryFull, match="the service's budget leaves 0 B") as caught:
        shmload.load_state_dict(shards[2], "bfloat16", keep=True, progress=pytest.fail)
    assert (caught.value.needed, caught.value.available) == (_SEGMENT, 0)
    assert len(shmload.segments()) == 2
    del state


@pytest.mark.slow  # it waits for the second sweep
def test_what_exceeds_the_budget_already_goes_as_soon_as_it_is_idle(service, shards):
    shmload.warm(shards[0], dtype="bfloat16")
    state = shmload.load_state_dict(shards[1], "bfloat16", keep=True)
    process = service("--budget", str(_SEGMENT - 1))
    until(lambda: resident() == {shards[1]})
    until(lambda: "1.00 MiB are resident, more than the budget of 1.00 MiB" in process.errors)
    del state
    until(lambda: resident() == set())
