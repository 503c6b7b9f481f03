"""Bad input and broken helpers: each gives its own error, which names the file and what to do.

That nothing is left behind, in /dev/shm or as a process, the leak check of conftest.py sees to.
What a header can lie about is listed in tests/unit/test_header.py; here are a few lies through
every door.
"""

import errno
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shmload
from shmload import _capacity
from shmload._coordinator import Coordinator
from shmload._header import TensorSpec, build_header
from shmload._linux import cgroup_free_nbytes, machine_free_nbytes
from shmload.workers import fill

SHM = Path("/dev/shm")
TENSORS = {"a": torch.arange(5000.0).reshape(50, 100), "b": torch.arange(7)}


def view(source, **kwargs):
    with shmload.view(source, **kwargs):
        pass


def state_dict(source, torch_dtype=None, **kwargs):
    shmload.load_state_dict(source, torch_dtype, **kwargs)


DOORS = {"warm": shmload.warm, "plan": shmload.plan, "view": view, "state-dict": state_dict}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
decoding_door = pytest.mark.parametrize(
    "door", [shmload.warm, view, state_dict], ids=["warm", "view", "state-dict"]
)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    return path


@pytest.fixture
def large(tmp_path):
    """A shard of 40 MB: its decoding is reported five times, and can be interfered with."""
    path = tmp_path / "large.safetensors"
    save_file({"a": torch.arange(10_000_000, dtype=torch.float32)}, path)
    return path


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "component"
    path.mkdir()
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        shard = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensor}, path / shard)
        weight_map[name] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def pipeline(tmp_path):
    """A pipeline of two components of a class that nobody has to import."""
    path = tmp_path / "pipeline"
    index = {"_class_name": "P"}
    for name in ("unet", "vae"):
        (path / name).mkdir(parents=True)
        save_file(TENSORS, path / name / "diffusion_pytorch_model.safetensors")
        index[name] = ["nowhere", "Unknown"]
    (path / "model_index.json").write_text(json.dumps(index))
    return path


def refusal(door, source, error, *words, **kwargs):
    """Check that a call is refused as it should be, and return the error."""
    with pytest.raises(error) as caught:
        door(source, **kwargs)
    assert type(caught.value) is error
    assert isinstance(caught.value, shmload.ShmloadError)
    for word in words:
        assert str(word) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


# Shards -------------------------------------------------------------------------------------------


@every_door
@pytest.mark.parametrize("length", [0, 5, 8, 100, -4, -1])
def test_truncated_shard(checkpoint, door, length):
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:length])
    error = refusal(
        door,
        checkpoint,
        shmload.ShardTruncated,
        checkpoint,
        "download it again",
        torch_dtype=torch.bfloat16,
    )
    assert error.got == len(content[:length])
    assert error.wanted > error.got


@every_door
def test_truncated_shard_among_good_ones(folder, door):
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refusal(door, folder, shmload.ShardTruncated, shard, torch_dtype=torch.bfloat16)


def lie(content, old, new):
    assert content.count(old) == 1
    assert len(old) == len(new)
    return content.replace(old, new)


LIES = {
    "length": lambda content: b"\xff" * 8 + content[8:],
    "bytes behind": lambda content: content + b"x",
    "shape": lambda content: lie(content, b"[50,100]", b"[50,101]"),
    "dtype": lambda content: lie(content, b'"F32"', b'"F99"'),
    "offsets": lambda content: lie(content, b"[0,56]", b"[8,64]"),
    "json": lambda content: lie(content, b'"F32",', b'"F32"}'),
    "twice": lambda content: lie(content, b'"b":{', b'"a":{'),
    "pointer": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
}


@every_door
@pytest.mark.parametrize("kind", LIES)
def test_lying_header(checkpoint, door, kind):
    checkpoint.write_bytes(LIES[kind](checkpoint.read_bytes()))
    refusal(
        door,
        checkpoint,
        shmload.ShardMalformed,
        checkpoint,
        "download it again",
        torch_dtype=torch.bfloat16,
    )


@every_door
def test_missing_shard(folder, door):
    (folder / "model-00001-of-00002.safetensors").unlink()
    error = refusal(
        door,
        folder,
        shmload.ShardMissing,
        folder / "model-00001-of-00002.safetensors",
        folder / "model.safetensors.index.json",
        "download the checkpoint again",
    )
    assert isinstance(error, FileNotFoundError)


@every_door
@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", ".."])
def test_index_that_points_outside_its_directory(folder, door, name):
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refusal(door, folder, shmload.IndexMalformed, index, repr(name), "download the checkpoint")


@pytest.mark.parametrize("door", [shmload.warm, shmload.plan, view])
def test_pipeline_that_points_outside_its_directory(pipeline, door):
    shutil.copytree(pipeline / "vae", pipeline.parent / "outside")
    index = pipeline / "model_index.json"
    index.write_text(json.dumps({"_class_name": "P", "../outside": ["nowhere", "Unknown"]}))
    refusal(door, pipeline, shmload.IndexMalformed, index, "../outside", "download the checkpoint")


@every_door
def test_index_that_is_no_json(folder, door):
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    refusal(door, folder, shmload.IndexMalformed, index, "JSON", "download the checkpoint again")


@every_door
@pytest.mark.parametrize("dtype", ["bfloat17", "int8", torch.int32, 16])
def test_wrong_dtype(checkpoint, door, dtype):
    error = refusal(
        door, checkpoint, shmload.UnknownDtype, repr(dtype), "bfloat16", torch_dtype=dtype
    )
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("door", [shmload.warm, shmload.plan, view])
def test_wrong_dtype_of_one_component(pipeline, door):
    dtypes = {"vae": "bfloat17", "default": torch.bfloat16}
    refusal(door, pipeline, shmload.UnknownDtype, "'bfloat17'", torch_dtype=dtypes)


@pytest.mark.parametrize("door", [shmload.warm, shmload.plan, view])
def test_unknown_component(pipeline, door):
    refusal(
        door, pipeline, shmload.UnknownComponent, pipeline, "'vea'", "unet, vae", components=["vea"]
    )


@every_door
@pytest.mark.parametrize(
    "source", ["/no/such/model", "no/such/model/at all", "no/such-model", "nothing", ""]
)
def test_source_that_does_not_exist(door, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal(door, source, shmload.SourceNotFound, source)
    assert isinstance(error, FileNotFoundError)


@pytest.mark.timeout(20)  # a FIFO that is opened the usual way blocks for ever
@every_door
@pytest.mark.parametrize("kind", ["fifo", "directory", "loop"])
def test_shard_that_is_no_file(folder, door, kind):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "directory":
        shard.mkdir()
    else:
        shard.symlink_to(shard.name)
    with pytest.raises(shmload.CheckpointError, match=str(shard)) as caught:
        door(folder)
    assert isinstance(caught.value, shmload.ShardUnreadable | shmload.ShardMissing)


def test_shard_that_may_not_be_read(checkpoint, child):
    checkpoint.chmod(0)
    # Root may read everything, unless it gives that up.
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    process = child(
        "import sys, shmload\n"
        "for door in (shmload.warm, shmload.plan, shmload.load_state_dict):\n"
        "    try:\n"
        "        door(sys.argv[1])\n"
        "    except shmload.ShardUnreadable as exc:\n"
        "        print('REFUSED', exc.errno, exc, flush=True)\n",
        checkpoint,
        prefix=prefix,
    )
    for _ in range(3):
        assert process.expect("REFUSED") == (
            f"{errno.EACCES} {checkpoint} cannot be read: Permission denied; "
            "check its permissions and the disk it is on"
        )


@decoding_door
def test_disk_that_fails_in_the_middle(checkpoint, door, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fill.os, "preadv", fail)
    refusal(
        door,
        checkpoint,
        shmload.ShardUnreadable,
        checkpoint,
        "Input/output error",
        torch_dtype=torch.bfloat16,
    )


def test_disk_that_fails_a_worker(checkpoint, workers_that):
    starts = workers_that(
        """
        def fail(*args):
            raise OSError(5, os.strerror(5))
        fill.os.preadv = fail
        """
    )
    refusal(
        shmload.warm,
        checkpoint,
        shmload.ShardUnreadable,
        checkpoint,
        "Input/output error",
        torch_dtype=torch.bfloat16,
    )
    assert starts() == 1  # another worker would fare no better


# Shards that change meanwhile ---------------------------------------------------------------------


@pytest.fixture
def before_decoding(monkeypatch):
    """Do something when all is planned and before any weight is read."""

    def install(action):
        decode = Coordinator.decode

        def act_and_decode(*args, **kwargs):
            action()
            return decode(*args, **kwargs)

        monkeypatch.setattr(Coordinator, "decode", act_and_decode)

    return install


def once(action):
    """Make a progress callback that acts at its first call."""
    is_done = []

    def report(done, total):
        if not is_done:
            is_done.append(True)
            assert done < total
            action()

    return report


@decoding_door
def test_shard_truncated_in_the_middle(large, door):
    size = large.stat().st_size
    error = refusal(
        door,
        large,
        shmload.ShardTruncated,
        large,
        "download it again",
        torch_dtype=torch.bfloat16,
        progress=once(lambda: os.truncate(large, 20_000_001)),
    )
    assert (error.wanted, error.got) == (size, 20_000_001)


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 30])
def test_shard_truncated_before_a_worker_reads_it(large, configure, before_decoding, inline_nbytes):
    configure(inline_nbytes=inline_nbytes, workers=1)
    before_decoding(lambda: os.truncate(large, 20_000_001))
    refusal(shmload.warm, large, shmload.ShardTruncated, large, torch_dtype=torch.bfloat16)


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")


def append(path):
    with path.open("ab") as file:
        file.write(b"x")


def overwrite_and_set_the_clock_back(path):
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [overwrite, append, overwrite_and_set_the_clock_back]


@pytest.mark.parametrize("change", CHANGES)
@decoding_door
def test_shard_changed_in_the_middle(large, door, change):
    refusal(
        door,
        large,
        shmload.ShardChanged,
        large,
        "load again",
        torch_dtype=torch.bfloat16,
        progress=once(lambda: change(large)),
    )


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 30])
@pytest.mark.parametrize("change", CHANGES)
def test_shard_changed_between_its_header_and_its_weights(
    checkpoint, configure, before_decoding, change, inline_nbytes
):
    # A long time, where another process was decoding it and died.
    configure(inline_nbytes=inline_nbytes, workers=1)
    before_decoding(lambda: change(checkpoint))
    refusal(
        shmload.warm,
        checkpoint,
        shmload.ShardChanged,
        checkpoint,
        "load again",
        torch_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("moment", ["before", "in the middle"])
def test_shard_replaced_meanwhile_gives_the_old_bytes_and_is_not_served_as_the_new(
    large, before_decoding, evicts, moment
):
    old = load_file(large)["a"].bfloat16()
    fresh = large.with_suffix(".new")
    save_file({"a": torch.ones(10_000_000)}, fresh)
    progress = None
    if moment == "before":
        before_decoding(lambda: fresh.exists() and fresh.replace(large))
    else:
        progress = once(lambda: fresh.replace(large))
    state = shmload.load_state_dict(large, torch.bfloat16, keep=True, progress=progress)
    assert torch.equal(state["a"], old)
    assert [info.is_current for info in shmload.segments()] == [False]
    again = shmload.load_state_dict(large, torch.bfloat16)
    assert again["a"].eq(1).all()


# Room ---------------------------------------------------------------------------------------------

SMALL_SHM = 'mount -t tmpfs -o size=16m,mode=1777{options} tmpfs /dev/shm && exec "$0" "$@"'


@pytest.fixture
def in_small_shm():
    """Run Python in a namespace where /dev/shm has 16 MiB."""

    def run(*arguments, options="", expected=0):
        command = ["unshare", "-Urm", "sh", "-c", SMALL_SHM.format(options=options)]
        if subprocess.run([*command, "true"], capture_output=True, timeout=60).returncode:
            pytest.skip("this system does not let one mount in a namespace")
        done = subprocess.run(
            [*command, sys.executable, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == expected, done.stderr
        return done

    return run


TRY = """
import os, sys
import shmload
seen = []
def report(done, total):
    seen.append(done)
    if "fill" in sys.argv and not os.path.exists("/dev/shm/other"):
        file = os.open("/dev/shm/other", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(file, 0, os.statvfs("/dev/shm").f_bavail * 4096)
        os.close(file)
try:
    shmload.warm(sys.argv[1], torch_dtype="bfloat16", progress=report)
    print("DONE")
except shmload.ShmloadError as exc:
    assert "\\n" not in str(exc)
    print(type(exc).__name__, getattr(exc, "errno", None), exc)
print(len(seen), sum(name.startswith("shmload-") for name in os.listdir("/dev/shm")))
"""


def test_shm_too_small_is_said_before_anything_is_read(large, in_small_shm):
    said, left = in_small_shm("-c", TRY, large).stdout.splitlines()
    assert said.startswith(f"SharedMemoryFull {errno.ENOSPC} 19.08 MiB needed in shared memory")
    for word in ("/dev/shm leaves 16.00 MiB", "shmload rm", "remount,size", "--shm-size"):
        assert word in said
    assert left == "0 0"  # neither bytes read nor names


def test_shm_too_small_is_one_line_of_the_command(large, in_small_shm):
    done = in_small_shm("-m", "shmload", "warm", large, "--dtype", "bf16", expected=1)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "needed in shared memory but /dev/shm leaves 16.00 MiB" in done.stderr


def test_shm_large_enough_is_enough(tmp_path, in_small_shm):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8_000_000)}, path)  # 15.3 of 16 MiB
    assert in_small_shm("-c", TRY, path).stdout.splitlines()[0] == "DONE"


def test_shm_that_fills_up_in_the_middle(tmp_path, in_small_shm, configure):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8_000_000)}, path)
    said, left = in_small_shm("-c", TRY, path, "fill").stdout.splitlines()
    assert said.startswith(f"SharedMemoryFull {errno.ENOSPC} ")
    assert "shmload rm" in said
    assert left == "1 0"  # one report, no names


def test_shm_that_fills_up_before_a_worker_writes(tmp_path, in_small_shm, configure):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8_000_000)}, path)
    configure(inline_nbytes=0, workers=1)
    code = (
        "from shmload._coordinator import Coordinator\n"
        "decode = Coordinator.decode\n"
        "def fill_and_decode(*args):\n"
        "    report(0, 0)\n"
        "    return decode(*args)\n"
        "Coordinator.decode = fill_and_decode\n"
    )
    code = TRY.replace("try:\n    shmload.warm", f"{code}try:\n    shmload.warm")
    said, left = in_small_shm("-c", code, path, "fill").stdout.splitlines()
    assert said.startswith(f"SharedMemoryFull {errno.ENOSPC} ")
    assert left.endswith(" 0")


@pytest.mark.parametrize("inodes", [1, 2])
def test_shm_without_inodes_is_an_error_of_ours(checkpoint, in_small_shm, inodes):
    code = TRY.replace("shmload.warm(", "next(iter(shmload.view(").replace(
        "progress=report)", "progress=report).gen))"
    )
    options = f",nr_inodes={inodes}"  # the root takes one; the segment the second, the view a third
    said, left = in_small_shm("-c", code, checkpoint, options=options).stdout.splitlines()
    assert said.startswith("SharedMemoryFull ")
    assert "inodes" in said
    assert left.endswith(" 0")


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Put this process into a made-up control group."""

    def make(limit, used):
        group = tmp_path / "cgroup" / "box"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("inactive_file 0\n")
        membership = tmp_path / "membership"
        membership.write_text("0::/box\n")
        read = functools.partial(cgroup_free_nbytes, tmp_path / "cgroup", membership)
        monkeypatch.setattr(_capacity, "cgroup_free_nbytes", read)

    return make


def never(done, total):
    raise AssertionError("bytes were read")


@decoding_door
def test_no_room_in_the_control_group(large, door, cgroup):
    cgroup(1 << 30, (1 << 30) - (50 << 20))  # less than the segment and the margin
    error = refusal(
        door,
        large,
        shmload.MemoryLimitExceeded,
        "19.08 MiB needed",
        "the memory control group leaves 50.00 MiB",
        "raise the container's memory limit",
        torch_dtype=torch.bfloat16,
        progress=never,
    )
    assert (error.needed >> 20, error.available, error.errno) == (19, 50 << 20, errno.ENOSPC)
    assert isinstance(error, OSError)


def test_room_in_the_control_group(large, cgroup):
    cgroup(1 << 30, (1 << 30) - (90 << 20))
    state_dict(large, torch.bfloat16)


@decoding_door
def test_no_room_in_the_machine(large, door, tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100000 kB\nMemAvailable: 51200 kB\n")
    read = functools.partial(machine_free_nbytes, meminfo)
    monkeypatch.setattr(_capacity, "machine_free_nbytes", read)
    refusal(
        door,
        large,
        shmload.MemoryLimitExceeded,
        "the machine's memory leaves 50.00 MiB",
        "shmload rm",
        torch_dtype=torch.bfloat16,
        progress=never,
    )


def test_what_takes_no_room_needs_none(checkpoint, evicts, monkeypatch):
    shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    monkeypatch.setattr(_capacity, "shm_free_nbytes", lambda: 0)
    shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    state_dict(checkpoint)  # maps the file


# Squatted names -----------------------------------------------------------------------------------


def squat_link(path, victim):
    path.symlink_to(victim)


def squat_readable_file(path, victim):
    path.write_bytes(b"evil")
    path.chmod(0o644)


def squat_fifo(path, victim):
    os.mkfifo(path)


def squat_directory(path, victim):
    path.mkdir()


def squat_as_somebody_else(path, victim):
    path.write_bytes(b"evil")
    path.chmod(0o600)
    os.chown(path, 65534, 65534)


@pytest.mark.timeout(20)  # a FIFO again
@pytest.mark.parametrize("suffix", ["", ".part"])
@pytest.mark.parametrize(
    "squat",
    [
        squat_link,
        squat_readable_file,
        squat_fifo,
        squat_directory,
        pytest.param(
            squat_as_somebody_else,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_squatted_name(checkpoint, evicts, shm_names, squat, suffix):
    (planned,) = shmload.plan(checkpoint, torch_dtype=torch.bfloat16, keep=True).shards
    victim = checkpoint.parent / "victim"
    victim.write_bytes(b"precious")
    name = planned.segment + suffix
    squat(SHM / name, victim)
    before = os.lstat(SHM / name)
    for door in (shmload.warm, view, state_dict):
        refusal(
            door,
            checkpoint,
            shmload.SegmentUntrusted,
            f"/dev/shm/{name}",
            "ask its owner to remove it",
            torch_dtype=torch.bfloat16,
        )
    assert victim.read_bytes() == b"precious"
    after = os.lstat(SHM / name)
    assert (after.st_ino, after.st_mode, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_size,
    )
    assert shmload.segments() == shmload.collect_garbage() == []
    assert shm_names() == [name]


# Workers ------------------------------------------------------------------------------------------

WORKER = """#!{python}
import os, signal, socket, sys
with open({starts!r}, "a") as file:
    file.write("started\\n")
def is_first():
    try:
        os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
from shmload._messages import *
from shmload.workers import fill, main as program
channel_fd, parent = int(sys.argv[-2]), int(sys.argv[-1])
def harm_when_writing(harm):
    write = fill._write
    def harmful(*args):
        write(*args)
        harm()
    fill._write = harmful
def say(*messages):
    with socket.socket(fileno=os.dup(channel_fd)) as channel:
        for message in messages:
            send(channel, message)
{code}
program.main(channel_fd, parent)
"""


@pytest.fixture
def workers_that(monkeypatch, tmp_path, configure):
    """Start workers that run some code first; returns a function that counts their starts."""

    def install(code, **settings):
        starts = tmp_path / "starts"
        starts.touch()
        script = tmp_path / "worker"
        script.write_text(
            WORKER.format(
                python=sys.executable,
                starts=str(starts),
                mark=str(tmp_path / "mark"),
                code=textwrap.dedent(code),
            )
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        configure(**{"inline_nbytes": 0, "workers": 1} | settings)
        return lambda: len(starts.read_text().splitlines())

    return install


DIE = "harm_when_writing(lambda: os.kill(os.getpid(), signal.SIGKILL))"
DIE_ONCE = "harm_when_writing(lambda: is_first() and os.kill(os.getpid(), signal.SIGKILL))"
STOP = "harm_when_writing(lambda: os.kill(os.getpid(), signal.SIGSTOP))"
STOP_ONCE = "harm_when_writing(lambda: is_first() and os.kill(os.getpid(), signal.SIGSTOP))"


def assert_right(source):
    wanted = load_file(source)
    got = shmload.load_state_dict(source, torch.bfloat16, verify=True)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        other = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(got[name], other)


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_killed_once_is_replaced(checkpoint, workers_that, caplog, workers):
    starts = workers_that(DIE_ONCE, workers=workers)
    assert_right(checkpoint)
    # The second of two may be ended before it has begun.
    assert 2 <= starts() <= workers + 1
    assert caplog.messages == ["a worker was lost (WorkerDied); its pieces go to another"]


def test_pieces_behind_the_one_that_killed_a_worker_are_not_lost(tmp_path, workers_that):
    # Four pieces: those that waited in the dead worker's socket have to be done, and once.
    path = tmp_path / "model.safetensors"
    wanted = torch.arange(30_000_000, dtype=torch.float32)
    save_file({"a": wanted}, path)
    starts = workers_that(DIE_ONCE)
    seen = []
    state = shmload.load_state_dict(
        path, torch.float64, verify=True, progress=lambda *counts: seen.append(counts)
    )
    assert starts() == 2
    assert torch.equal(state["a"], wanted.double())
    assert seen[-1] == (120_000_000, 120_000_000)


@decoding_door
def test_worker_killed_twice_is_an_error(checkpoint, workers_that, door):
    starts = workers_that(DIE)
    error = refusal(
        door,
        checkpoint,
        shmload.WorkerDied,
        checkpoint,
        "SIGKILL",
        "dmesg",
        torch_dtype=torch.bfloat16,
    )
    assert starts() == 2
    assert error.path == checkpoint


def test_worker_that_exits_in_the_middle_says_its_code(checkpoint, workers_that):
    workers_that("harm_when_writing(lambda: os._exit(7))")
    refusal(state_dict, checkpoint, shmload.WorkerDied, "exit code 7", torch_dtype=torch.bfloat16)


def test_stopped_worker_is_replaced(checkpoint, workers_that):
    starts = workers_that(STOP_ONCE, stall_timeout_s=1)
    assert_right(checkpoint)
    assert starts() == 2


@decoding_door
def test_worker_stopped_twice_is_an_error(checkpoint, workers_that, door):
    starts = workers_that(STOP, stall_timeout_s=1)
    refusal(
        door,
        checkpoint,
        shmload.WorkerStalled,
        checkpoint,
        " 1 s",
        "SHMLOAD_STALL_TIMEOUT_S",
        torch_dtype=torch.bfloat16,
    )
    assert starts() == 2


@decoding_door
def test_worker_that_cannot_start_is_not_started_again(checkpoint, workers_that, door):
    starts = workers_that("print('my last words', file=sys.stderr); sys.exit(3)")
    error = refusal(
        door, checkpoint, shmload.WorkerFailed, "exit code 3", "-P", torch_dtype=torch.bfloat16
    )
    assert starts() == 1
    assert error.__notes__ == ["its output: my last words"]


@pytest.mark.parametrize("kind", ["missing", "no program"])
def test_interpreter_that_cannot_be_run(checkpoint, monkeypatch, configure, tmp_path, kind):
    configure(inline_nbytes=0)
    broken = tmp_path / "nothing" if kind == "missing" else checkpoint
    monkeypatch.setattr(sys, "executable", str(broken))
    refusal(state_dict, checkpoint, shmload.WorkerFailed, broken, torch_dtype=torch.bfloat16)


def test_worker_that_never_gets_ready(checkpoint, workers_that):
    starts = workers_that("signal.pause()", start_timeout_s=0.5)
    refusal(
        state_dict, checkpoint, shmload.WorkerFailed, "not ready in 0.5 s", torch_dtype="bfloat16"
    )
    assert starts() == 1


def test_worker_that_fails_says_where(checkpoint, workers_that):
    workers_that("harm_when_writing(lambda: 1 / 0)")
    error = refusal(
        state_dict, checkpoint, shmload.WorkerFailed, checkpoint, torch_dtype=torch.bfloat16
    )
    assert "ZeroDivisionError" in error.__notes__[0]


def test_worker_that_prints_disturbs_nothing(checkpoint, workers_that, capfd):
    workers_that("os.write(1, b'x' * (1 << 20)); os.write(2, b'y' * (1 << 20))")
    assert_right(checkpoint)
    assert capfd.readouterr() == ("", "")


RUBBISH = {
    "rubbish": "os.write(channel_fd, b'\\0\\0\\0\\5hello')",
    "huge length": "os.write(channel_fd, b'\\xff' * 4)",
    "half a frame": "os.write(channel_fd, b'\\0\\0\\1\\0' + b'x' * 9)",
    "no UTF-8": "os.write(channel_fd, b'\\0\\0\\0\\x09\\x81\\xa4type\\xa2\\xff\\xfe')",
    "another version": "say(Ready(VERSION + 1, os.getpid()))",
    "answer to no piece": "say(Ready(VERSION, os.getpid()), Filled(9, 9, b''))",
    "failure of no piece": "say(Ready(VERSION, os.getpid()), Failed(9, 9, Reason.INTERNAL, ''))",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("after", ["signal.pause()", "sys.exit(4)"])
@pytest.mark.parametrize("kind", RUBBISH)
def test_worker_that_sends_rubbish_is_an_error_and_no_loop(checkpoint, workers_that, kind, after):
    starts = workers_that(f"{RUBBISH[kind]}; {after}", start_timeout_s=1, stall_timeout_s=1)
    with pytest.raises(shmload.WorkerError):
        shmload.load_state_dict(checkpoint, torch.bfloat16)
    assert starts() <= 3


def children_of_this_process():
    return [
        int(pid)
        for task in os.listdir("/proc/self/task")
        for pid in Path(f"/proc/self/task/{task}/children").read_text().split()
    ]


def wait_for_the_end_of(pid):
    pidfd = os.pidfd_open(pid)
    assert select.select([pidfd], [], [], 20)[0]
    os.close(pidfd)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how_often", ["once", "always"])
def test_worker_that_dies_before_its_first_piece(
    checkpoint, workers_that, before_decoding, how_often
):
    starts = workers_that(
        f"""
        if {how_often == "always"} or is_first():
            say(Ready(VERSION, os.getpid()))
            sys.exit(5)
        """
    )
    # So that the parent finds the news that it is ready in the socket of a dead worker.
    before_decoding(lambda: wait_for_the_end_of(*children_of_this_process()))
    if how_often == "once":
        assert_right(checkpoint)
    else:
        refusal(
            state_dict, checkpoint, shmload.WorkerDied, "exit code 5", torch_dtype=torch.bfloat16
        )
    assert starts() == 2


def write_alternating(path, count):
    """Write tensors of which no two neighbours can be one run."""
    specs = tuple(
        TensorSpec(f"t{number}", ("F32", "I32")[number % 2], (16,), number * 64, number * 64 + 64)
        for number in range(count)
    )
    path.write_bytes(build_header(specs, {}, 8) + bytes(64 * len(specs)))


@pytest.mark.timeout(30)
def test_stopped_worker_that_reads_nothing_does_not_block_its_coordinator(tmp_path, workers_that):
    # A piece of so many runs that its message does not fit into the socket.
    path = tmp_path / "model.safetensors"
    write_alternating(path, 20_000)
    starts = workers_that(
        """
        if is_first():
            say(Ready(VERSION, os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
        stall_timeout_s=3,
    )
    assert len(shmload.load_state_dict(path, torch.bfloat16)) == 20_000
    assert starts() == 2


@pytest.mark.timeout(30)
def test_worker_that_blocks_its_coordinator_is_not_taken_for_the_others(
    tmp_path, workers_that, monkeypatch
):
    # Two pieces. The first worker is at one when the second is ready, is given the other, and
    # stops without reading what is more than its socket takes.
    monkeypatch.setattr("shmload._layout.PIECE_NBYTES", 960_000)
    path = tmp_path / "model.safetensors"
    write_alternating(path, 40_000)
    meeting = tmp_path / "meeting"
    os.mkfifo(meeting)
    starts = workers_that(
        f"""
        if is_first():
            real = fill.Filler.fill
            def meet_and_fill(*args):
                fill.Filler.fill = real
                open({str(meeting)!r}, "w").close()
                return real(*args)
            fill.Filler.fill = meet_and_fill
        elif os.path.exists({str(meeting)!r}):
            open({str(meeting)!r}).close()
            os.unlink({str(meeting)!r})
            say(Ready(VERSION, os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        """,
        stall_timeout_s=3,
        workers=2,
    )
    assert len(shmload.load_state_dict(path, torch.bfloat16)) == 40_000
    assert starts() == 3


@pytest.mark.timeout(30)
def test_worker_that_dies_when_it_is_no_longer_needed_is_no_error(
    checkpoint, configure, monkeypatch
):
    class Returned(Exception):
        pass

    decode = Coordinator.decode

    def decode_and_lose_the_worker(coordinator, jobs, on_bytes, _):
        def lose_and_cancel():
            if not coordinator._workers[0]._opened:
                return False
            # By now the worker has the shard open, and is told to close it when all is over.
            os.kill(coordinator._workers[0].pid, signal.SIGKILL)
            wait_for_the_end_of(coordinator._workers[0].pid)
            return True

        decode(coordinator, jobs, on_bytes, lose_and_cancel)
        raise Returned

    monkeypatch.setattr(Coordinator, "decode", decode_and_lose_the_worker)
    configure(inline_nbytes=0, workers=1)
    with pytest.raises(Returned):
        shmload.load_state_dict(checkpoint, torch.bfloat16)


# Pipelines ----------------------------------------------------------------------------------------


def shard_of(source, component):
    (path,) = (source / component).glob("*.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["decoded", "mapped"])
@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_pipeline_with_a_truncated_shard(copied, component, dtype):
    source = copied("flux")
    shard = shard_of(source, component)
    os.truncate(shard, shard.stat().st_size - 1)
    refusal(shmload.load_pipeline, source, shmload.ShardTruncated, shard, torch_dtype=dtype)


def test_pipeline_with_a_lying_header(copied):
    source = copied("flux")
    shard = shard_of(source, "vae")
    append(shard)
    refusal(
        shmload.load_pipeline, source, shmload.ShardMalformed, shard, torch_dtype=torch.bfloat16
    )


def test_pipeline_with_a_missing_shard(copied):
    source = copied("flux", sharded=True)
    shard = sorted((source / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    refusal(shmload.load_pipeline, source, shmload.ShardMissing, shard, torch_dtype=torch.bfloat16)


def test_pipeline_with_an_index_that_points_outside(copied):
    source = copied("flux", sharded=True)
    (index,) = (source / "transformer").glob("*.index.json")
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../vae/other.safetensors")
    index.write_text(json.dumps(content))
    refusal(
        shmload.load_pipeline, source, shmload.IndexMalformed, index, torch_dtype=torch.bfloat16
    )


@pytest.mark.parametrize("dtype", ["bfloat17", {"transformer": "bfloat17"}, {"default": 7}])
def test_pipeline_in_a_wrong_dtype(saved, dtype):
    refusal(
        shmload.load_pipeline, saved("flux"), shmload.UnknownDtype, "bfloat16", torch_dtype=dtype
    )


@pytest.mark.parametrize("source", ["/no/such/model", "no/such-model"])
def test_pipeline_that_does_not_exist(source):
    refusal(shmload.load_pipeline, source, shmload.SourceNotFound, source)


def test_pipeline_that_is_none(checkpoint, folder):
    for source in (checkpoint, folder):
        refusal(shmload.load_pipeline, source, shmload.SourceNotFound, source, "model_index.json")


def test_pipeline_without_room(saved, cgroup):
    cgroup(1 << 30, 1 << 30)
    refusal(
        shmload.load_pipeline,
        saved("flux"),
        shmload.MemoryLimitExceeded,
        "raise the container's memory limit",
        torch_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_shard_is_truncated_meanwhile(copied, before_decoding, shm_names, keep):
    source = copied("flux")
    shard = shard_of(source, "transformer")
    before_decoding(lambda: os.truncate(shard, 100_000))
    refusal(
        shmload.load_pipeline,
        source,
        shmload.ShardTruncated,
        shard,
        torch_dtype=torch.bfloat16,
        keep=keep,
    )
    assert shm_names() == []


def test_pipeline_whose_worker_is_killed_once(saved, workers_that):
    starts = workers_that(DIE_ONCE)
    source = saved("flux")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    wanted = load_file(shard_of(source, "transformer"))
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16())
    assert starts() == 2


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_workers_are_killed(saved, workers_that, shm_names, keep):
    starts = workers_that(DIE)
    refusal(
        shmload.load_pipeline,
        saved("flux"),
        shmload.WorkerDied,
        "SIGKILL",
        torch_dtype=torch.bfloat16,
        keep=keep,
    )
    assert starts() == 2
    assert shm_names() == []
