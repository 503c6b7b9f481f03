"""Does on a Ray cluster of this machine what docs/cluster.md describes, and prints what it saw.

`test_ray` starts it as a process: Ray leaves threads behind, and adds packages to the path. Where
the kernel allows it, the second node has a /dev/shm of its own; else the two are one host.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from ray.data import ActorPoolStrategy
from safetensors.torch import save_file
from warming import CHILD
from watching import children_of, until

from shmload.integrations import ray as shmray

# linux/sched.h and linux/mount.h
_CLONE_FS = 0x00000200
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 1 << 18
_SMALL = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 << 20}
_ACTORS = 3  # on two nodes with two CPUs each: one node has two

cluster = Cluster()


def add_node(shm=None, **arguments):
    """Start a node; `shm` are the mount options of its own /dev/shm."""
    # /dev/shm may be too small for Ray's object store.
    arguments |= _SMALL | {"plasma_directory": os.environ["RAY_TMPDIR"]}
    with own_shm(shm) if shm else contextlib.nullcontext():
        return cluster.add_node(**arguments)


@contextlib.contextmanager
def own_shm(options):
    """Give processes that this thread starts a /dev/shm of their own, which needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        check(libc.unshare(_CLONE_NEWNS))
        try:
            # Private, so that the mount does not appear in parent namespaces.
            check(libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None))
            data = f"mode=1777,{options}".encode()
            check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, data))
            yield
        finally:
            check(libc.unshare(_CLONE_FS))  # undo the sharing with threads started since
            check(libc.setns(before, _CLONE_NEWNS))
    finally:
        os.close(before)


def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def processes_of(node):
    """Return the pids of a node: that of its raylet, and those of the raylet's children."""
    (raylet,) = node.all_processes["raylet"]
    return [raylet.process.pid, *children_of(raylet.process.pid)]


def is_waiting(node):
    """Tell whether a process of a node has another process's part open, and so waits for it."""
    for pid in processes_of(node):
        with contextlib.suppress(OSError):  # the process or descriptor has gone
            links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
            if any("shmload-" in link and link.endswith(".part") for link in links):
                return True
    return False


@contextlib.contextmanager
def builder(checkpoint):
    """Have a process of the first host build a checkpoint, and stop until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, "warm", checkpoint],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        until(lambda: process.stdout.readline().startswith("AT"))
        yield
        process.communicate()


def give_weights(pipe, batch, *, meeting):
    """Yield for each row the digest of all weights, and what its actor is; pickled by value."""
    (meeting / str(os.getpid())).touch()
    until(lambda: len(list(meeting.iterdir())) >= _ACTORS, 180)  # each imports torch
    with open("/proc/self/maps") as lines:
        segments = sorted({line.split()[4] for line in lines if "/shmload-" in line})
    tensors = [each for name in ("vae", "text_encoder")
               for each in getattr(pipe, name).state_dict().values()]  # fmt: skip
    raw = b"".join(each.view(torch.uint8).numpy().tobytes() for each in tensors)
    says = [hashlib.sha256(raw).hexdigest(), ray.get_runtime_context().get_node_id(), segments]
    for row in batch["id"]:
        yield {"row": [(int(row), *says)]}


# What is done -------------------------------------------------------------------------------------


def by_node(reports):
    """Return what each node says: what it has read, or its error."""
    return {
        report.node_id: [type(report.error).__name__, str(report.error)]
        if report.error
        else report.report.read_nbytes
        for report in reports
    }


def main(checkpoint, pipeline, folder):
    # By default Ray checks nodes every 3 s and declares one dead after five failures.
    config = {"health_check_period_ms": 500, "health_check_failure_threshold": 2}
    first = add_node(_system_config=config)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with own_shm("size=1m"):
            own = "size=4m"
    except OSError:
        own = None
    second = add_node(own)
    names = {first.node_id: "first", second.node_id: "second"}
    warm = functools.partial(shmray.warm_cluster, checkpoint, torch_dtype="bfloat16")
    seen = {"has_own_shm": bool(own), "warmed": by_node(warm()), "again": by_node(warm())}
    seen["listed"] = sorted({i.source for each in shmray.cluster_segments() for i in each.report})
    seen["evicted"] = sum(len(each.report) for each in shmray.evict_cluster(checkpoint))
    large = Path(folder, "large.safetensors")
    save_file({"weight": torch.ones(1 << 20, 2)}, large)
    seen["full"] = by_node(shmray.warm_cluster(str(large)))
    shmray.evict_cluster(str(large))
    with builder(checkpoint):
        seen["late"] = by_node(warm(nodes=[first.node_id], timeout_s=5.0))
        until(lambda: not is_waiting(first))
    seen["late_again"] = by_node(warm(nodes=[first.node_id]))
    shmray.evict_cluster(checkpoint)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with builder(checkpoint):
            victim = add_node()
            names[victim.node_id] = "victim"
            warming = pool.submit(warm, timeout_s=60)
            until(lambda: is_waiting(victim) and is_waiting(first))
            for pid in processes_of(victim):  # at once, as when the power fails
                os.kill(pid, signal.SIGKILL)
            cluster.remove_node(victim, allow_graceful=False)
        seen["dead"] = by_node(warming.result())
    shmray.evict_cluster(checkpoint)
    meeting = Path(folder, "meeting")
    meeting.mkdir()
    rows = ray.data.range(4 * _ACTORS, override_num_blocks=2 * _ACTORS).map_batches(
        shmray.Stage,
        fn_constructor_args=(give_weights, pipeline),
        fn_constructor_kwargs={"components": ["vae", "text_encoder"], "torch_dtype": "bfloat16"},
        fn_kwargs={"meeting": meeting},
        compute=ActorPoolStrategy(size=_ACTORS),
        batch_size=2,
        num_cpus=1,
    )
    seen["rows"] = [row["row"] for row in rows.take_all()]
    text = json.dumps(seen)
    for node_id, name in names.items():
        text = text.replace(node_id, name)
    return text


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to stderr, not among the answers
    try:
        print(main(*sys.argv[1:]), file=answers, flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()
