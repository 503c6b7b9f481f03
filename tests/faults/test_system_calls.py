"""If a system call fails or a process dies at one, each segment is complete or is garbage.

strace injects the fault into real processes at the exact call, so the code needs no test hooks.
"""

import errno
import json
import stat
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from tracing import needs_strace
from warming import SHM

import shmload
from shmload._segments.names import lock_name
from shmload.workers import fill

# Warms its source, or maps it into a view; prints what it read or the error.
LOADER = """
import sys
import shmload
door, source = sys.argv[1:]
try:
    if door == "warm":
        print("DONE", shmload.warm(source, torch_dtype="bfloat16").read_nbytes, flush=True)
    else:
        with shmload.view(source, torch_dtype="bfloat16"):
            print("DONE", flush=True)
except shmload.ShmloadError as exc:
    assert "\\n" not in str(exc)
    fields = [getattr(exc, name, None) for name in ("errno", "wanted", "got")]
    print("REFUSED", type(exc).__name__, *fields, exc, flush=True)
"""


@pytest.fixture
def inject(new_child):
    """Load a source in a process with a fault at its calls on some files."""

    def start(source, calls, what, *files, door="warm"):
        return new_child(LOADER, door, source, prefix=tracing(calls, what, *files))

    return start


def tracing(calls, what, *files):
    paths = [word for path in files for word in ("-P", str(path))]
    log = f"{files[0]}.strace" if "/dev/shm" not in str(files[0]) else "/dev/null"
    return (
        *("strace", "-f", "-qq", "-o", log, *paths),
        *("-e", f"trace={calls}", "-e", f"inject={calls}:{what}"),
    )


def part_of(source):
    (shard,) = shmload.plan(source, torch_dtype=torch.bfloat16, keep=True).shards
    return SHM / f"{shard.segment}.part"


WORKERS = pytest.mark.parametrize("inline_nbytes", [0, 1 << 30], ids=["worker", "inline"])
READS = "preadv,preadv2"


# Reading ------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_strace
@WORKERS
@pytest.mark.parametrize(
    ("calls", "what", "said"),
    [
        ("pread64", "error=EIO:when=1", f"ShardUnreadable {errno.EIO} "),
        ("pread64", "error=EIO:when=2", f"ShardUnreadable {errno.EIO} "),
        (READS, "error=EIO:when=2", f"ShardUnreadable {errno.EIO} "),
        # The file ends at 2 MiB, after two blocks, although fstat reports more.
        (READS, "retval=0:when=3", "ShardTruncated None {size} {there} "),
    ],
    ids=["length", "header", "weights", "end"],
)
def test_disk_that_fails_at_a_call(
    large, inject, configure, shm_names, calls, what, said, inline_nbytes
):
    configure(inline_nbytes=inline_nbytes, workers=1)
    process = inject(large, calls, what, large)
    answer = process.expect("REFUSED")
    size = large.stat().st_size
    assert answer.startswith(said.format(size=size, there=2 << 20))
    assert str(large) in answer
    assert process.wait() == 0
    assert shm_names() == []


@needs_strace
@WORKERS
def test_interrupted_reads_and_writes_go_on(large, inject, configure, evicts, inline_nbytes):
    configure(inline_nbytes=inline_nbytes, workers=1)
    process = inject(large, f"{READS},pwrite64", "error=EINTR:when=2+3", large, part_of(large))
    assert process.expect("DONE") == str(40_000_000)
    shmload.verify()
    got = shmload.load_state_dict(large, torch.bfloat16)
    assert torch.equal(got["a"], load_file(large)["a"].bfloat16())


def test_reads_and_writes_in_small_portions_add_up(checkpoint, evicts, monkeypatch):
    preadv, pwrite = fill.os.preadv, fill.os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(
            fill.os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1001]], offset)
        )
        patch.setattr(fill.os, "pwrite", lambda fd, buffer, offset: pwrite(fd, buffer[:77], offset))
        shmload.warm(checkpoint, torch_dtype=torch.bfloat16, verify=True)
    got = shmload.load_state_dict(checkpoint, torch.bfloat16)
    assert torch.equal(got["a"], load_file(checkpoint)["a"].bfloat16())
    assert torch.equal(got["b"], load_file(checkpoint)["b"])


# Writing ------------------------------------------------------------------------------------------


@needs_strace
@pytest.mark.parametrize(
    ("inline_nbytes", "when", "error"),
    [
        (1 << 30, 1, "ENOSPC"),
        (1 << 30, 2, "ENOSPC"),
        (1 << 30, 2, "ENOMEM"),
        (1 << 30, 2, "EDQUOT"),
        (1 << 30, 3, "ENOMEM"),
        (0, 2, "EDQUOT"),
    ],
    ids=["header", "weights", "no memory", "quota", "digest", "worker"],
)
def test_memory_that_runs_out_at_a_write(
    checkpoint, inject, configure, shm_names, inline_nbytes, when, error
):
    configure(inline_nbytes=inline_nbytes, workers=1)
    process = inject(checkpoint, "pwrite64", f"error={error}:when={when}", part_of(checkpoint))
    answer = process.expect("REFUSED")
    assert answer.startswith(f"SharedMemoryFull {errno.ENOSPC} ")
    assert "shmload rm" in answer
    assert process.wait() == 0
    assert shm_names() == []


@needs_strace
@WORKERS
def test_memory_that_runs_out_at_the_second_shard_frees_the_first(
    tmp_path, inject, configure, shm_names, inline_nbytes
):
    configure(inline_nbytes=inline_nbytes, workers=1)
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    for name, shard in weight_map.items():
        save_file({name: torch.ones(1 << 20)}, tmp_path / shard)  # written in four blocks
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    part = part_of(tmp_path / "2.safetensors")
    process = inject(tmp_path, "pwrite64", "error=ENOSPC:when=3", part)
    assert process.expect("REFUSED").startswith(f"SharedMemoryFull {errno.ENOSPC} ")
    assert process.wait() == 0
    assert shm_names() == []


# Dying --------------------------------------------------------------------------------------------


@needs_strace
def test_workers_killed_at_their_third_read(large, inject, configure, shm_names):
    # strace counts per process, so the worker that takes over dies at the same call.
    configure(inline_nbytes=0, workers=1)
    process = inject(large, READS, "signal=SIGKILL:when=3", large)
    answer = process.expect("REFUSED")
    assert answer.startswith("WorkerError ")
    assert "SIGKILL" in answer
    assert process.wait() == 0
    assert shm_names() == []


# A loader's calls on a part, and then on its segment, in order.
STEPS = {
    "looks for the segment": "openat:when=1",
    "makes the part": "openat:when=2",
    "locks it": "flock:when=1",
    "empties it": "ftruncate:when=1",
    "looks once more": "openat:when=3",
    "gives it its length": "ftruncate:when=2",
    "writes its header": "pwrite64:when=1",
    "writes weights": "pwrite64:when=2",
    "writes its digest": "pwrite64:when=3",
    "gives it its name": "rename:when=1",
    "takes its name away": "unlink:when=1",
    "makes it read-only": "fchmod:when=1",
    "closes it": "close:when=1",
}


# Only kept segments get a final name; only parts that are not kept lose theirs. Until a part is
# complete, the two take the same steps.
OF_VIEW = list(STEPS)[list(STEPS).index("writes its digest") :]
NOT_DONE = {("warm", "takes its name away"), ("view", "gives it its name")}


@needs_strace
@pytest.mark.parametrize(
    ("door", "step"),
    sorted({*product(["warm"], STEPS), *product(["view"], OF_VIEW)} - NOT_DONE),
)
def test_killed_at_any_step_it_leaves_a_segment_or_garbage(
    checkpoint, inject, evicts, shm_names, door, step
):
    call, when = STEPS[step].split(":", 1)
    part = part_of(checkpoint)
    segment = part.with_suffix("")
    process = inject(checkpoint, call, f"signal=SIGKILL:{when}", part, segment, door=door)
    assert process.wait() != 0, "it does not come to that step"
    # A segment with a final name is complete, and no leftover hinders the next load.
    assert set(shm_names()) <= {part.name, segment.name, lock_name("room")}
    is_there = [info.name for info in shmload.verify()] == [segment.name]
    assert is_there == segment.exists()
    report = shmload.warm(checkpoint, torch_dtype=torch.bfloat16, verify=True)
    assert report.segments == (segment.name,)
    assert (report.read_nbytes == 0) == is_there
    assert shm_names() == [segment.name]
    assert stat.S_IMODE(segment.stat().st_mode) == 0o400  # also where the step had left it writable
    got = shmload.load_state_dict(checkpoint, torch.bfloat16)
    assert torch.equal(got["a"], load_file(checkpoint)["a"].bfloat16())
