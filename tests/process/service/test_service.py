"""Loads through the service give the same result, from one copy, within a budget."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from children import run_to_end
from comparing import assert_loads_equal
from serving import ask, status, wait_until
from warming import NBYTES, TENSORS, as_bf16, assert_same

import shmload
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import (
    Reserve,
    Reserved,
)
from shmload.errors import SharedMemoryFull

# Loading ------------------------------------------------------------------------------------------


def test_load_is_the_same_and_is_counted(service, checkpoint, shm_names):
    service()
    seen = []
    state = shmload.load_state_dict(
        checkpoint, "bfloat16", keep=True, progress=lambda done, total: seen.append((done, total))
    )
    assert_same(state, as_bf16(TENSORS))
    assert seen[-1] == (NBYTES, NBYTES)
    assert len(shm_names()) == 1
    seen.clear()
    assert_same(shmload.load_state_dict(checkpoint, "bfloat16"), as_bf16(TENSORS))
    assert seen == []
    found = status()
    assert (found.misses, found.hits) == (1, 1)


def test_private_load_is_a_miss_too(service, checkpoint):
    service()
    for _ in range(2):
        shmload.load_state_dict(checkpoint, "bfloat16")
    assert (status().misses, status().hits) == (2, 0)  # the segment is not kept
    for _ in range(2):
        shmload.warm(checkpoint, torch_dtype="bfloat16")
    assert (status().misses, status().hits) == (3, 1)


@pytest.mark.libraries
def test_pipeline_is_the_same(service, saved):
    service()
    source = saved("stable-diffusion")
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert (status().misses, status().hits) == (8, 0)


def test_many_clients_at_once_share_one_decode(service, checkpoint, child):
    service()
    code = (
        "import sys, shmload\n"
        "print('READY', flush=True)\n"
        "sys.stdin.readline()\n"
        "state = shmload.load_state_dict(sys.argv[1], 'bfloat16', keep=True)\n"
        "print('SUM', float(state['a.weight'].double().sum()), flush=True)"
    )
    clients = [child(code, checkpoint) for _ in range(4)]
    for each in clients:
        each.expect("READY")
    for each in clients:
        each.say()
    wanted = float(TENSORS["a.weight"].bfloat16().double().sum())
    assert {float(each.expect("SUM")) for each in clients} == {wanted}
    assert status().misses == 1


def test_leases_say_who_holds_what(service, checkpoint):
    service()
    state = shmload.load_state_dict(checkpoint, "bfloat16", keep=True)
    (lease,) = status().leases
    assert (lease.segment, lease.pids) == (shmload.segments()[0].name, (os.getpid(),))
    del state
    gc.collect()
    wait_until(lambda found: found.leases == ())


def test_lease_of_a_process_that_cannot_be_seen_is_listed_too(service, checkpoint, child, evicts):
    # As in another pid namespace, where /proc/locks shows no pids.
    code = (
        "import contextlib, shmload\n"
        "from shmload._segments import users\n"
        "from shmload._service.state import ServiceState\n"
        "users.lock_holders, users.mappers = dict, lambda inodes: {}\n"
        "with contextlib.closing(ServiceState(0)) as state:\n"
        "    for lease in state.status().leases: print('LEASE', lease.segment, lease.pids)\n"
        "print('END', flush=True)"
    )
    service()
    state = shmload.load_state_dict(checkpoint, "bfloat16", keep=True)
    other = child(code)
    assert other.expect("LEASE") == f"{shmload.segments()[0].name} ()"
    other.expect("END")
    del state


def test_remove_says_what_went_and_who_keeps_the_rest(service, shards, command):
    service()
    state = shmload.load_state_dict(shards[0], "bfloat16", keep=True)
    shmload.warm(shards[1], torch_dtype="bfloat16", pin=True)
    (kept,) = names_of(shards[:1])
    wait_until(lambda found: len(found.leases) == 1)
    _, listed, _ = command("ls")
    lines = [line.split() for line in listed.splitlines()]
    assert lines[0] == ["MODEL", "DTYPE", "SIZE", "USED", "BY", "LAST", "USED", "PINNED"]
    assert lines[1][:5] == ["0.safetensors", "bfloat16", "1.00", "MiB", str(os.getpid())]
    assert (lines[1][-2:], lines[2][-1]) == (["now", "-"], "yes")
    # Another process is told to end the one that holds it.
    done = run_to_end([sys.executable, "-m", "shmload", "rm", "--all"])
    assert done.returncode == 1
    assert done.stdout.startswith("removed 1 segment,")
    assert done.stderr == (
        f"shmload: still in use: 0.safetensors (bfloat16) by process {os.getpid()}; "
        "end that process, or evict later (1 removed)\n"
    )
    assert names_of(shards) == [kept]
    del state


# The budget ---------------------------------------------------------------------------------------

_SEGMENT = (1 << 20) + 4096


def names_of(paths):
    return [info.name for path in paths for info in shmload.segments() if info.source == str(path)]


def test_least_recently_used_goes_first(service, shards):
    service("--budget", str(3 * _SEGMENT))
    for path in shards[:3]:
        shmload.warm(path, torch_dtype="bfloat16")
    shmload.warm(shards[0], torch_dtype="bfloat16")  # its last use is now the newest
    (gone,) = shmload.warm(shards[3], torch_dtype="bfloat16").evicted
    assert (gone.model, gone.dtype) == (shards[1].name, "bfloat16")
    assert {Path(info.source) for info in shmload.segments()} == {shards[0], shards[2], shards[3]}
    assert status().evictions == 1


def test_leased_and_pinned_segments_stay(service, shards):
    service("--budget", str(3 * _SEGMENT))
    state = shmload.load_state_dict(shards[0], "bfloat16", keep=True)
    shmload.warm(shards[1], torch_dtype="bfloat16", pin=True)
    shmload.warm(shards[2], torch_dtype="bfloat16")
    shmload.warm(shards[3], torch_dtype="bfloat16")
    assert {Path(info.source) for info in shmload.segments()} == {shards[0], shards[1], shards[3]}
    assert state["weight"].eq(0).all()


def test_what_goes_with_its_load_needs_no_room_in_the_budget(service, shards, shm_names):
    service("--budget", "0")
    assert shmload.load_state_dict(shards[0], "bfloat16")["weight"].dtype == torch.bfloat16
    assert shm_names() == []
    with pytest.raises(SharedMemoryFull):
        shmload.warm(shards[0], torch_dtype="bfloat16")


def test_what_exceeds_the_budget_is_refused_before_a_byte_is_read(service, shards):
    service("--budget", str(2 * _SEGMENT))
    state = shmload.load_state_dict(shards[0], "bfloat16", keep=True)
    shmload.warm(shards[1], torch_dtype="bfloat16", pin=True)
    with pytest.raises(SharedMemoryFull, match="the service's budget leaves 0 B") as caught:
        shmload.load_state_dict(shards[2], "bfloat16", keep=True, progress=pytest.fail)
    assert (caught.value.needed, caught.value.available) == (_SEGMENT, 0)
    assert len(shmload.segments()) == 2
    del state


def test_room_is_reserved_for_one_client_only(service, shards):
    service("--budget", str(3 * _SEGMENT))
    with Client(socket_path()) as first:
        first.ask(Reserve(2 * _SEGMENT, 0), Reserved)
        with Client(socket_path()) as second, pytest.raises(SharedMemoryFull):
            second.ask(Reserve(2 * _SEGMENT, 0), Reserved)
    ask(Reserve(3 * _SEGMENT, 60), Reserved)
