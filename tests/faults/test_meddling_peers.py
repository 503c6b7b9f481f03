"""The kernel refuses every attempt of another process to change a resident segment.

Root may do anything, and so may the same user after a chmod of the segment. Shmload does not guard
against these, so the peers here can do neither.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from warming import SHM

import shmload

# Tries all ways to change, cut or replace a segment, and prints the result of each.
PEER = """
import ctypes, json, mmap, os, sys
import shmload
from shmload._segments.segment import attach
path, builder, uid = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, MADV_REMOVE = 1, 2, 9
def call(function, *args):
    if function(*args):
        raise OSError(ctypes.get_errno(), function.__name__)
def on_shared_mapping(fd, name, argument):
    address = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    call(getattr(libc, name), ctypes.c_void_p(address), ctypes.c_size_t(4096), argument)
def write_through_the_builder():
    for name in os.listdir(f"/proc/{builder}/fd"):
        link = f"/proc/{builder}/fd/{name}"
        if os.readlink(link) == path:
            os.open(link, os.O_RDWR)
            return
    raise FileNotFoundError("the builder has it no more")
def replace():
    own = f"/dev/shm/{os.getpid()}"
    open(own, "w").close()
    try:
        os.rename(own, path)
    finally:
        os.unlink(own)
def by_path():
    yield "open", lambda: os.open(path, os.O_RDWR)
    yield "open to cut", lambda: os.open(path, os.O_WRONLY | os.O_TRUNC)
    yield "open to append", lambda: os.open(path, os.O_WRONLY | os.O_APPEND)
    yield "truncate", lambda: os.truncate(path, 0)
    yield "by the builder's descriptor", write_through_the_builder
def by_descriptor(fd):
    yield "write", lambda: os.pwrite(fd, b"x", 4096)
    yield "truncate by descriptor", lambda: os.ftruncate(fd, 0)
    yield "allocate", lambda: os.posix_fallocate(fd, 0, 1 << 20)
    hole = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    yield "punch", lambda: call(libc.fallocate, fd, hole, 0, 4096)
    yield "map", lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    yield "protect", lambda: on_shared_mapping(fd, "mprotect", mmap.PROT_READ | mmap.PROT_WRITE)
    yield "remove", lambda: on_shared_mapping(fd, "madvise", MADV_REMOVE)
    yield "reopen", lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
def by_name():
    yield "open to read", lambda: os.open(path, os.O_RDONLY)
    yield "unlink", lambda: os.unlink(path)
    yield "rename", lambda: os.rename(path, path + ".gone")
    yield "replace", replace
    yield "chmod", lambda: os.chmod(path, 0o666)
    yield "attach", lambda: attach(os.path.basename(path))
attempts = list(by_path())
if uid == os.stat(path).st_uid:
    attempts += by_descriptor(attach(os.path.basename(path)).fd)
else:
    attempts += by_name()
answers = {}
for what, attempt in attempts:
    try:
        attempt()
        answers[what] = "done"
    except OSError as exc:
        answers[what] = os.strerror(exc.errno)
    except shmload.SegmentUntrusted:
        answers[what] = "untrusted"
print("ANSWERS", json.dumps(answers), flush=True)
"""


@pytest.fixture
def resident(checkpoint, evicts):
    """A segment that this process decoded and holds, and the tensors over it."""
    state = shmload.load_state_dict(checkpoint, torch.bfloat16, keep=True)
    (info,) = shmload.segments()
    assert info.is_leased
    yield SHM / info.name
    # Check before touching tensors: SIGBUS would kill this process if the segment was cut.
    assert shmload.verify() == [info]
    wanted = load_file(checkpoint)
    assert torch.equal(state["a"], wanted["a"].bfloat16())
    assert torch.equal(state["b"], wanted["b"])
    assert (SHM / info.name).stat().st_mode & 0o7777 == 0o400


_OPENING = dict.fromkeys(
    ("open", "open to cut", "open to append", "truncate", "by the builder's descriptor"),
    "Permission denied",
)


def test_peer_of_the_same_user_can_change_nothing(resident, new_child):
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    peer = new_child(PEER, resident, os.getpid(), os.geteuid(), prefix=prefix)
    assert json.loads(peer.expect("ANSWERS")) == _OPENING | {
        "write": "Bad file descriptor",
        "truncate by descriptor": "Invalid argument",
        "allocate": "Bad file descriptor",
        "punch": "Bad file descriptor",
        "map": "Permission denied",
        "protect": "Permission denied",
        "remove": "Permission denied",
        "reopen": "Permission denied",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_user_can_not_even_read(resident, child):
    peer = child(PEER, resident, os.getpid(), 65534)
    assert json.loads(peer.expect("ANSWERS")) == _OPENING | {
        "open to read": "Permission denied",
        "unlink": "Operation not permitted",
        "rename": "Operation not permitted",
        "replace": "Operation not permitted",
        "chmod": "Operation not permitted",
        "attach": "untrusted",
    }
