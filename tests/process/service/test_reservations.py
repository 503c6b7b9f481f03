"""Room in the budget is reserved for a load until it ends."""

import contextlib
import json
import threading

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import shmload
from shmload._segments.acquire import acquire
from shmload._service import state as state_module
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


def ask(request, kind):
    with Client(socket_path()) as client:
        return client.ask(request, kind, on_progress=lambda done, total: None)


def names_of(source):
    planned = shmload.plan(source, torch_dtype="bfloat16", keep=True).shards
    return [shard.segment for shard in planned]


def has_room(nbytes):
    try:
        ask(Reserve(nbytes), Reserved)
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
        while not shmload.segments():
            pass
        while not has_room(2 * _SEGMENT):
            pass
        assert [info.name for info in shmload.segments()] == names[:1]
    warming.join()


def test_segment_that_is_only_looked_at_may_go(shards, evicts, monkeypatch):
    shmload.warm(shards[0], torch_dtype="bfloat16")
    (info,) = shmload.segments()
    listings = [[msgspec.structs.replace(info, is_leased=True)]]
    monkeypatch.setattr(
        state_module, "segments", lambda: listings.pop() if listings else shmload.segments()
    )
    with contextlib.closing(ServiceState(1, _SEGMENT)) as state:
        assert state.reserve(_SEGMENT) == [info.name]
