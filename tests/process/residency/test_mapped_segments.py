"""A segment is in use as long as a program of this user maps it, with a lease or without."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file
from warming import TENSORS, as_bf16, assert_same

import shmload
from shmload._loading import load

# A program that shmload never saw: it maps a file, and ends with its stdin.
MAPPER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("MAPPED", flush=True)
sys.stdin.readline()
mapped.close()
print("CLOSED", flush=True)
"""


@pytest.fixture
def map_through_view(child):
    """Have another program map a resident file through a view that then ends."""

    def start(path):
        with shmload.view(path, torch_dtype="bfloat16", keep=True) as lent:
            program = child(MAPPER, lent)
            program.expect("MAPPED")
        return program

    return start


def is_leased():
    return [info.is_leased for info in shmload.segments()]


def test_what_was_loaded_through_a_view_is_in_use(checkpoint):
    with shmload.view(checkpoint, torch_dtype="bfloat16", keep=True) as path:
        state = load_file(path)
    assert is_leased() == [True]
    with pytest.raises(shmload.SegmentBusy, match=f"process {os.getpid()}"):
        shmload.evict(checkpoint)
    assert_same(state, as_bf16(TENSORS))
    del state
    assert is_leased() == [False]
    assert len(shmload.evict(checkpoint)) == 1


def test_what_an_unknown_program_maps_is_in_use(checkpoint, map_through_view):
    program = map_through_view(checkpoint)
    assert is_leased() == [True]
    with pytest.raises(shmload.SegmentBusy, match=f"process {program.pid}"):
        shmload.evict(checkpoint)
    checkpoint.touch()  # the segment is outdated now
    assert shmload.collect_garbage() == []
    program.say()
    program.expect("CLOSED")
    assert is_leased() == [False]
    assert len(shmload.collect_garbage()) == 1


def test_shared_segment_goes_with_its_last_lease_though_it_is_mapped(
    checkpoint, map_through_view, shm_names
):
    map_through_view(checkpoint)
    (info,) = shmload.segments()
    (Path("/dev/shm") / info.name).chmod(0o500)
    with shmload.view(checkpoint, torch_dtype="bfloat16"):
        assert info.name in shm_names()
    assert shm_names() == []  # no process would remove it when that program ends


def test_load_that_fails_leaves_what_another_process_maps(
    checkpoint, child, monkeypatch, shm_names
):
    def fail(segment):
        child(MAPPER, Path("/dev/shm") / segment.name).expect("MAPPED")
        raise shmload.SegmentCorrupt("test", name=segment.name)

    monkeypatch.setattr(load, "check_digest", fail)
    with pytest.raises(shmload.SegmentCorrupt) as caught:
        shmload.warm(checkpoint, torch_dtype="bfloat16", verify=True)
    assert shm_names() == [caught.value.name]
