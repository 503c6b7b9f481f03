"""Room in the budget is reserved for a load until it ends."""

import contextlib
import json
import os
import signal
import threading

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from serving import ask, status, wait_until
from watching import until

import shmload
from shmload._loading import room
from shmload._segments import eviction, listing, users
from shmload._segments.part import acquire
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import Reserve, Reserved
from shmload._service.state import ServiceState
from shmload.errors import SharedMemoryFull

_SEGMENT = (1 << 20) + 4096


@pytest.fixture
def shards(tmp_path):
    """Two files of one checkpoint, each of 1 MiB in bfloat16."""
    folder = tmp_path / "folder"
    folder.mkdir()
    paths = [folder / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        save_file({f"weight{number}": torch.full((1 << 19,), float(number))}, path)
    index = {f"weight{number}": path.name for number, path in enumerate(paths)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return paths


@pytest.fixture
def files(tmp_path):
    """Six files, each of 1 MiB in bfloat16."""
    paths = [tmp_path / f"file{number}.safetensors" for number in range(6)]
    for number, path in enumerate(paths):
        save_file({"weight": torch.full((1 << 19,), float(number))}, path)
    return paths


def names_of(source):
    planned = shmload.plan(source, torch_dtype="bfloat16", keep=True).shards
    return [shard.segment for shard in planned]


def has_room(nbytes):
    try:
        ask(Reserve(nbytes, 0), Reserved)
    except SharedMemoryFull:
        return False
    return True


def test_what_is_resident_is_not_reserved_too(service, shards):
    service("--budget", str(3 * _SEGMENT))
    folder = shards[0].parent
    names = names_of(folder)
    warming = threading.Thread(
        target=shmload.warm, args=(folder,), kwargs={"torch_dtype": "bfloat16"}
    )
    with contextlib.closing(acquire(names[1])):  # holds up the second
        warming.start()
        until(shmload.segments)
        until(lambda: has_room(2 * _SEGMENT))
        assert [info.name for info in shmload.segments()] == names[:1]
    warming.join()


def test_segment_that_is_only_looked_at_may_go(shards, evicts, monkeypatch):
    shmload.warm(shards[0], torch_dtype="bfloat16")
    (info,) = shmload.segments()
    looks = iter([True])
    monkeypatch.setattr(
        eviction,
        "segments_by_lock",
        lambda: [
            msgspec.structs.replace(info, is_leased=next(looks, False))
            for info in shmload.segments()
        ],
    )
    with contextlib.closing(ServiceState(_SEGMENT)) as state, state.reservations.claim() as one:
        [gone] = state.reservations.reserve(one, _SEGMENT, 60, lambda: None)
        assert gone.name == info.name


def test_status_reads_the_mappings_of_processes_once(shards, evicts, monkeypatch):
    shmload.warm(shards[0], torch_dtype="bfloat16")
    looks = []
    for module in (listing, users):
        monkeypatch.setattr(module, "mappers", lambda inodes: looks.append(inodes) or {})
    with contextlib.closing(ServiceState(_SEGMENT)) as state:
        assert state.status().segments == len(looks) == 1


# Waiting for room ---------------------------------------------------------------------------------


def warm_in_thread(path, errors):
    def warm():
        try:
            shmload.warm(path, torch_dtype="bfloat16")
        except shmload.ShmloadError as exc:
            errors.append(exc)

    thread = threading.Thread(target=warm)
    thread.start()
    return thread


def test_loads_wait_for_the_room_of_those_that_run(service, files):
    service("--budget", str(5 * _SEGMENT // 2))
    errors = []
    with Client(socket_path()) as other:
        other.ask(Reserve(2 * _SEGMENT, 0), Reserved)
        warming = [warm_in_thread(path, errors) for path in files]
        wait_until(lambda found: found.waiting_for_room == len(files))
    for thread in warming:
        thread.join()
    assert errors == []
    assert status().misses == len(files)
    assert sum(info.nbytes for info in shmload.segments()) == 2 * _SEGMENT


@pytest.mark.slow
def test_waiting_load_takes_the_service_for_alive_and_says_that_it_waits(
    service, files, configure, caplog, monkeypatch
):
    monkeypatch.setattr(room, "_QUIET_S", 0)
    configure(service="require", service_timeout_s=1)
    service("--budget", str(_SEGMENT))
    errors, is_past = [], threading.Event()
    clock = threading.Timer(1.5, is_past.set)
    with Client(socket_path()) as other:
        other.ask(Reserve(_SEGMENT, 0), Reserved)
        warming = warm_in_thread(files[0], errors)
        wait_until(lambda found: found.waiting_for_room)
        clock.start()
        assert is_past.wait(60)
        assert warming.is_alive()
        other.settle()
    warming.join()
    assert errors == []
    assert "waiting for 1.00 MiB of room in the service's budget" in caplog.text


def test_what_can_never_fit_does_not_wait(service, files):
    service("--budget", str(2 * _SEGMENT))
    with Client(socket_path()) as other:
        other.ask(Reserve(_SEGMENT, 60), Reserved)
        with Client(socket_path()) as big, pytest.raises(SharedMemoryFull):
            big.ask(Reserve(3 * _SEGMENT, 60), Reserved)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_waiting_load_leaves_the_queue_when_it_ends(service, files, child, number, shm_names):
    service("--budget", str(_SEGMENT))
    code = "import sys, shmload; shmload.warm(sys.argv[1], torch_dtype='bfloat16')"
    with Client(socket_path()) as other:
        other.ask(Reserve(_SEGMENT, 0), Reserved)
        waiting = child(code, files[0])
        wait_until(lambda found: found.waiting_for_room == 1)
        os.kill(waiting.pid, number)
        wait_until(lambda found: found.waiting_for_room == 0)
        assert waiting.wait() != 0
    ask(Reserve(_SEGMENT, 60), Reserved)
    assert len(shm_names()) == (number == signal.SIGKILL)  # its part, which the next load takes


def test_end_of_the_service_ends_the_wait(service, files):
    process = service("--budget", str(_SEGMENT))
    errors = []
    with Client(socket_path()) as other:
        other.ask(Reserve(_SEGMENT, 0), Reserved)
        warming = warm_in_thread(files[0], errors)
        wait_until(lambda found: found.waiting_for_room == 1)
        process.process.terminate()
        warming.join()  # it has decoded without the service
    assert errors == []
    assert process.wait() == 0


def test_view_that_is_in_use_does_not_let_others_wait(service, files):
    service("--budget", str(_SEGMENT))
    with (
        shmload.view(files[0], torch_dtype="bfloat16", keep=True),
        pytest.raises(SharedMemoryFull, match="1 segment in use"),
    ):
        shmload.warm(files[1], torch_dtype="bfloat16")
