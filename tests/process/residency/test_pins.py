"""What is pinned stays; what is kept for a time goes when it was idle for so long."""

import contextlib
import os
import time
from datetime import timedelta

import pytest
from warming import SHM, idle_for

import shmload
from shmload._doctor import diagnose
from shmload._segments import segment
from shmload._segments.names import try_turn
from shmload._segments.upkeep import find_garbage
from shmload._service.keeper import Keeper
from shmload.errors import ArgumentError, SegmentNotFound, SegmentTimeout

_HOUR_S = 3600


def pinned():
    return [info.source for info in shmload.segments() if info.is_pinned]


@pytest.fixture
def resident(shards, evicts):
    """Two resident files."""
    for path in shards[:2]:
        shmload.warm(path, dtype="bfloat16")
    return shards[:2]


# Pins ---------------------------------------------------------------------------------------------


def test_pin_and_unpin_take_what_evict_takes(resident):
    (info,) = shmload.pin(resident[0])
    assert info.is_pinned
    assert pinned() == [str(resident[0])]
    shmload.pin("1.safetensors")
    assert len(pinned()) == 2
    assert str(shmload.models()).count("pinned") == 2
    assert [info.source for info in shmload.unpin(resident[0])] == [str(resident[0])]
    assert pinned() == [str(resident[1])]
    for change in (shmload.pin, shmload.unpin):
        with pytest.raises(ArgumentError, match="needs the names"):
            change()
        with pytest.raises(SegmentNotFound):
            change("nothing")


def test_pin_moves_to_the_new_version_of_a_file(resident, command):
    path = resident[0]
    shmload.pin(path)
    (old,) = [info for info in shmload.segments() if info.is_pinned]
    path.write_bytes(path.read_bytes())
    assert "1.00 MiB pinned, of files that have changed" in leftovers()
    assert "pinned, so it stays" in command("gc")[1]
    shmload.warm(path, dtype="float16")  # another model
    assert pinned() == [str(path)]
    (new,) = shmload.warm(path, dtype="bfloat16").segments
    assert [info.name for info in shmload.segments() if info.is_pinned] == [new]
    assert shmload.collect_garbage() == [old.name]
    assert leftovers() == "none"


def leftovers():
    return next(each.detail for each in diagnose() if each.name == "leftovers")


@pytest.mark.parametrize("left", [0o600, 0o1600])
def test_change_ends_what_a_killed_one_has_left_writable(resident, left):
    path = SHM / shmload.segments()[0].name
    path.chmod(left)  # as a process that is killed while it writes the time
    shmload.warm(resident[0], dtype="bfloat16", keep_for="1h")
    assert os.stat(path).st_mode & 0o7777 == left & ~0o200


def test_change_waits_for_one_that_was_stopped_with_a_deadline(resident, monkeypatch):
    monkeypatch.setattr(segment, "_TIMEOUT_S", 0.05)
    with try_turn("mode"), pytest.raises(SegmentTimeout, match="end that process"):
        shmload.pin(resident[0])
    assert pinned() == []


# Time to live -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_for", ["1h", 3600, timedelta(hours=1)])
def test_what_is_idle_for_its_time_goes_with_the_next_load(shards, evicts, keep_for):
    shmload.warm(shards[0], dtype="bfloat16", keep_for=keep_for)
    assert [info.keep_for_s for info in shmload.segments()] == [_HOUR_S]
    idle_for(_HOUR_S - 60)
    shmload.warm(shards[1], dtype="bfloat16")
    assert len(shmload.segments()) == 2
    idle_for(_HOUR_S)
    shmload.load_state_dict(shards[2], "bfloat16")
    assert [info.source for info in shmload.segments()] == [str(shards[1])]


def test_time_begins_when_what_was_loaded_is_given_back(shards, evicts):
    shmload.warm(shards[0], dtype="bfloat16", keep_for="1h")
    state = shmload.load_state_dict(shards[0], "bfloat16")
    idle_for(_HOUR_S)
    del state
    assert shmload.collect_garbage() == []
    with shmload.view(shards[0], dtype="bfloat16"):
        idle_for(_HOUR_S)
    assert shmload.collect_garbage() == []


def test_load_of_what_is_due_uses_it(shards, evicts, command):
    assert command("warm", shards[0], "--dtype", "bf16", "--keep-for", "1h")[0] == 0
    assert "59 min" in str(shmload.models())
    idle_for(_HOUR_S)
    assert shmload.warm(shards[0], dtype="bfloat16").read_nbytes == 0


def test_what_is_in_use_or_pinned_does_not_go(shards, evicts, command):
    shmload.warm(shards[0], dtype="bfloat16", keep_for="1h")
    state = shmload.load_state_dict(shards[0], "bfloat16")
    idle_for(_HOUR_S)
    assert shmload.collect_garbage() == []
    assert time.time() - shmload.segments()[0].used_at < 60  # it was seen in use
    del state
    shmload.pin(shards[0])
    idle_for(_HOUR_S)
    assert shmload.collect_garbage() == []
    shmload.unpin(shards[0])
    assert shmload.collect_garbage() == []  # the time begins again
    idle_for(_HOUR_S)
    (name,) = (info.name for info in shmload.segments())
    assert command("gc", "--dry-run")[1].startswith("would remove 1 segment, 1.00 MiB: ")
    assert shmload.collect_garbage() == [name]


def test_service_removes_what_is_due(shards, evicts):
    shmload.warm(shards[0], dtype="bfloat16", keep_for="1h")
    idle_for(_HOUR_S)
    with contextlib.closing(Keeper(1 << 30)) as keeper:
        keeper.sweep()
    assert not shmload.segments()


def test_pin_and_a_time_exclude_each_other(shards):
    with pytest.raises(ArgumentError, match="exclude each other"):
        shmload.warm(shards[0], pin=True, keep_for="1h")


def test_pinned_segment_whose_source_is_away_is_no_garbage(checkpoint, evicts):
    shmload.warm(checkpoint, pin=True)
    away = checkpoint.parent.rename(checkpoint.parent.with_name("away"))
    assert find_garbage() == shmload.collect_garbage() == []
    away.rename(checkpoint.parent)
    assert shmload.warm(checkpoint).read_nbytes == 0
