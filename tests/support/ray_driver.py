"""A driver with a Ray cluster on this machine; `ray_clusters` starts it.

It evaluates one expression per line and answers with its pickled value. Where the kernel allows it,
each node but the first has its own /dev/shm; with a shared one only one node would decode.
"""

import base64
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.data import ActorPoolStrategy
from ray_clusters import weights

from shmload.integrations import ray as shmray

# linux/sched.h and linux/mount.h
_CLONE_FS = 0x00000200
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 1 << 18
_SMALL = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20}
_DEADLINE_S = 50.0
# Actors of one stage wait for each other; each imports torch in a process of its own.
_MEETING_DEADLINE_S = 180.0

# Nodes --------------------------------------------------------------------------------------------

cluster = Cluster()
nodes = {}
_calls = {}


def add_node(shm=None, **arguments):
    """Start a node and return its id; `shm` are the mount options of its own /dev/shm."""
    # /dev/shm may be too small for Ray's object store.
    arguments |= _SMALL | {"plasma_directory": os.environ["RAY_TMPDIR"]}
    with _own_shm(shm) if shm else contextlib.nullcontext():
        node = cluster.add_node(**arguments)
    nodes[node.node_id] = node
    return node.node_id


def has_own_shm():
    """Tell whether nodes can have a /dev/shm of their own, which needs root."""
    try:
        with _own_shm("size=1m"):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def _own_shm(options):
    """Give processes that this thread starts a /dev/shm of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        _check(libc.unshare(_CLONE_NEWNS))
        try:
            data = f"mode=1777,{options}".encode()
            # Private, so that the mount does not appear in parent namespaces.
            _check(libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
            _check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, data))
            yield
        finally:
            _check(libc.unshare(_CLONE_FS))  # undo the sharing with threads started since
            _check(libc.setns(before, _CLONE_NEWNS))
    finally:
        os.close(before)


def _check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def kill(node_id):
    """Kill all processes of a node at once, like a power failure."""
    node = nodes.pop(node_id)
    for pid in (raylet_of(node), *_children_of(raylet_of(node))):
        os.kill(pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def raylet_of(node):
    (raylet,) = node.all_processes["raylet"]
    return raylet.process.pid


# Calls in the background --------------------------------------------------------------------------


def begin(name, call):
    """Call something in a thread."""

    def run():
        values.append(call())

    values = []
    thread = threading.Thread(target=run)
    _calls[name] = thread, values
    thread.start()


def finish(name):
    """Wait for a call in a thread and return its result."""
    thread, values = _calls.pop(name)
    thread.join(_DEADLINE_S)
    return values[0]


def until_waiting(node_id):
    """Wait until a process of a node has another process's part open, and so waits for it."""
    _until(lambda: _has_waiting(node_id))


def until_idle(node_id):
    """Wait until no process of a node has a part open."""
    _until(lambda: not _has_waiting(node_id))


def _has_waiting(node_id):
    return any(map(_has_part, _children_of(raylet_of(nodes[node_id]))))


def _children_of(pid):
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that just ended
            found.update(map(int, path.read_text().split()))
    return found


def _has_part(pid):
    with contextlib.suppress(OSError):  # the process or descriptor has gone
        folder = f"/proc/{pid}/fd"
        links = (os.readlink(f"{folder}/{number}") for number in os.listdir(folder))
        return any("shmload-" in link and link.endswith(".part") for link in links)
    return False


def _until(is_so, deadline_s=_DEADLINE_S):
    """Poll until a condition holds; there is no event to wait for from outside."""
    deadline = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


# Stages -------------------------------------------------------------------------------------------


class Witness(shmray.Stage):
    """A stage that records its actor's state, and begins once all actors have recorded theirs."""

    def __init__(self, *args, meeting, actors, **kwargs):
        faulthandler.dump_traceback_later(_MEETING_DEADLINE_S / 2)
        self._decoded = 0
        logger = logging.getLogger("shmload")
        logger.setLevel(logging.INFO)
        handler = logging.Handler()
        handler.emit = self._count
        logger.addHandler(handler)
        super().__init__(*args, **kwargs)
        (meeting / f"{os.getpid()}.new").write_text(json.dumps(self._describe()))
        (meeting / f"{os.getpid()}.new").rename(meeting / f"{os.getpid()}.json")
        _until(lambda: len(list(meeting.glob("*.json"))) >= actors, _MEETING_DEADLINE_S)
        faulthandler.cancel_dump_traceback_later()

    def _count(self, record):
        if found := re.search(r": (\d+) shards to decode", record.getMessage()):
            self._decoded += int(found[1])

    def _describe(self):
        with open("/proc/self/maps") as lines:
            mapped = {line.split()[4] for line in lines if "/shmload-" in line}
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "decoded": self._decoded,
            "segments": sorted(mapped),
            "missing": sorted(name for name, part in self.pipe.components.items() if part is None),
        }


def give_weights(pipe, batch, *, names):
    """Yield all bytes of some models for each row; pickled by value, like `Witness`."""
    for row in batch["id"]:
        yield {"id": [row], "weights": [b"".join(weights(getattr(pipe, name)) for name in names)]}


def run_stage(stage, source, names, size, **kwargs):
    """Run batches through `size` actors of one CPU each; return their rows."""
    rows = ray.data.range(4 * size, override_num_blocks=2 * size)
    return rows.map_batches(
        stage,
        fn_constructor_args=(give_weights, source),
        fn_constructor_kwargs=kwargs,
        fn_kwargs={"names": names},
        compute=ActorPoolStrategy(size=size),
        batch_size=2,
        num_cpus=1,
    ).take_all()


# The driver ---------------------------------------------------------------------------------------


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to stderr, not among the answers
    try:
        # By default Ray checks nodes every 3 s and declares one dead after five failures.
        config = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}
        add_node(_system_config=config)
        ray.init(address=cluster.address, log_to_driver=False)
        for line in sys.stdin:
            try:
                answer = eval(line, globals()), None
            except Exception as exc:
                traceback.print_exc()
                answer = None, f"{type(exc).__name__}: {exc}"
            print(base64.b64encode(pickle.dumps(answer)).decode(), file=answers, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
