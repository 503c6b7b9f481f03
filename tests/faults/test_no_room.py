"""Too little memory is an error before anything is read; if it runs out later nothing is left."""

import errno
import functools
import subprocess
import sys

import pytest
import torch
from children import run_to_end
from doors import decoding_door, refusal, state_dict
from safetensors.torch import save_file

import shmload
from shmload._host.procfs import machine_free_nbytes
from shmload._segments import eviction

SMALL_SHM = 'mount -t tmpfs -o size=16m,mode=1777{options} tmpfs /dev/shm && exec "$0" "$@"'


@pytest.fixture
def in_small_shm():
    """Run Python in a mount namespace with 16 MiB of /dev/shm."""

    def run(*arguments, options="", expected=0):
        command = ["unshare", "-Urm", "sh", "-c", SMALL_SHM.format(options=options)]
        if subprocess.run([*command, "true"], capture_output=True, timeout=60).returncode:
            pytest.skip("this system does not let one mount in a namespace")
        done = run_to_end([*command, sys.executable, *map(str, arguments)])
        assert done.returncode == expected, done.stderr
        return done

    return run


# Of these, /dev/shm is hidden in a namespace by a mount over /dev, which needs what Python opens.
NEW_DEV = "mount -t tmpfs tmpfs /dev && touch /dev/null /dev/urandom"
UNUSABLE = {
    "missing": (NEW_DEV, "No such file or directory"),
    "a file": (f"{NEW_DEV} && touch /dev/shm", "Not a directory"),
    "read-only": ("mount -t tmpfs -o ro tmpfs /dev/shm", "Read-only file system"),
    "another's": ("mount -t tmpfs -o mode=755 tmpfs /dev/shm && chmod 555 /dev/shm", "Permission"),
    "locked": ("mount -t tmpfs -o mode=0 tmpfs /dev/shm", "Permission denied"),
}
COMMANDS = """
import sys
from click.testing import CliRunner
from shmload._cli.main import main
for command in (["warm", sys.argv[1]], ["ls"], ["gc"], ["plan", sys.argv[1]], ["doctor"]):
    done = CliRunner().invoke(main, command)
    if done.exception and not isinstance(done.exception, SystemExit):
        print("TRACEBACK", command, repr(done.exception))
    print(done.output)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", UNUSABLE)
def test_unusable_shared_memory_is_one_sentence(checkpoint, how):
    prepare, reason = UNUSABLE[how]
    drop = "setpriv --inh-caps -all --bounding-set -all"
    command = ["unshare", "-Urm", "sh", "-c", f'{prepare} && exec {drop} "$0" "$@"']
    if subprocess.run([*command, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this system does not let one mount in a namespace")
    done = run_to_end([*command, sys.executable, "-c", COMMANDS, checkpoint])
    assert done.returncode == 0, done.stderr
    assert "TRACEBACK" not in done.stdout
    assert f"/dev/shm cannot be used: {reason}" in done.stdout
    assert "bad    shared memory" in done.stdout


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
    for word in ("/dev/shm leaves 16.00 MiB", "remount,size", "--shm-size"):
        assert word in said
    assert left == "0 0"  # no bytes read, no names left


def test_shm_that_fills_up_in_the_middle(tmp_path, in_small_shm, configure):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(8_000_000)}, path)
    said, left = in_small_shm("-c", TRY, path, "fill").stdout.splitlines()
    assert said.startswith(f"SharedMemoryFull {errno.ENOSPC} ")
    assert "shmload rm" in said
    assert left == "1 0"  # one progress report, no names left


PUBLISH = """
import contextlib, os, sys, torch, shmload
from pathlib import Path
from shmload._building import keeping, keys, remembered
model = torch.nn.Linear(1000, 2500, bias=False)  # 9.5 of 16 MiB
made_room = keeping.made_room
@contextlib.contextmanager
def make_room_and_fill(*args, **kwargs):
    with made_room(*args, **kwargs) as gone:
        yield gone
    file = os.open("/dev/shm/other", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(file, 0, os.statvfs("/dev/shm").f_bavail * 4096 - (1 << 20))
    os.close(file)
keeping.made_room = make_room_and_fill
file = Path(sys.argv[1])
key = keys.key_of((file,), {}, file)
for publish in (
    lambda: shmload.publish(model, "linear"),
    lambda: remembered.once(key, lambda _: model, keep=True),
):
    try:
        print("MADE", publish() is model)
    except shmload.ShmloadError as exc:
        print(type(exc).__name__, getattr(exc, "errno", None), exc)
    os.unlink("/dev/shm/other")
    print("LEFT", *(name for name in os.listdir("/dev/shm") if name.startswith("shmload-")))
"""


@pytest.mark.slow
@pytest.mark.libraries
def test_shm_that_fills_up_while_a_model_is_published(in_small_shm):
    said, left, made, left_again = in_small_shm("-c", PUBLISH, __file__).stdout.splitlines()
    assert said.startswith(f"SharedMemoryFull {errno.ENOSPC} ")
    assert made == "MADE True"
    assert left == left_again == "LEFT"


BESIDE_ANOTHER = """
import os, signal, sys
import shmload
how, first, second = sys.argv[1:]
readable, writable = os.pipe()
def report(done, total):
    os.write(writable, b"x")
    os.kill(os.getpid(), signal.SIGKILL if how == "dead" else signal.SIGSTOP)
other = os.fork()
if other == 0:
    shmload.warm(first, torch_dtype="bfloat16", progress=report)
os.read(readable, 1)
if how == "dead":
    os.waitpid(other, 0)
try:
    shmload.warm(second, torch_dtype="bfloat16")
    print("DONE")
except shmload.SharedMemoryFull as exc:
    print("FULL", exc)
print(sorted(name.endswith(".part") for name in os.listdir("/dev/shm")))
if how == "alive":
    os.kill(other, signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "said", "parts"),
    [("dead", "DONE", [False]), ("alive", "FULL 15.26 MiB needed", [True])],
)
def test_part_of_a_dead_loader_gives_way_and_that_of_a_living_one_does_not(
    tmp_path, in_small_shm, how, said, parts
):
    # Of 16 MiB the first has written one, and has reserved so much that the second lacks room.
    paths = [tmp_path / name for name in ("first.safetensors", "second.safetensors")]
    for path in paths:
        save_file({"a": torch.ones(8_000_000)}, path)
    answer, left = in_small_shm("-c", BESIDE_ANOTHER, how, *paths).stdout.splitlines()
    assert answer.startswith(said)
    assert left == str(parts)


@pytest.mark.parametrize("inodes", [1, 2])
def test_shm_without_inodes_is_an_error_of_ours(checkpoint, in_small_shm, inodes):
    code = TRY.replace("shmload.warm(", "next(iter(shmload.view(").replace(
        "progress=report)", "progress=report).gen))"
    )
    # The root takes one inode, the segment the second, and the view a third.
    options = f",nr_inodes={inodes}"
    said, left = in_small_shm("-c", code, checkpoint, options=options).stdout.splitlines()
    assert said.startswith("SharedMemoryFull ")
    assert "inodes" in said
    assert left.endswith(" 0")


def never(done, total):
    raise AssertionError("bytes were read")


@decoding_door
def test_no_room_in_the_control_group(large, door, cgroup):
    cgroup(1 << 30, (1 << 30) - (70 << 20))  # less than the segment and the margin
    error = refusal(
        door,
        large,
        shmload.MemoryLimitExceeded,
        "19.08 MiB needed",
        "the memory control group leaves 6.00 MiB",
        "raise the container's memory limit",
        progress=never,
    )
    assert (error.needed >> 20, error.available, error.errno) == (19, 6 << 20, errno.ENOSPC)
    assert isinstance(error, OSError)


def test_no_room_for_the_workers(large, cgroup, configure):
    configure(workers=16, inline_nbytes=0)
    cgroup(1 << 30, (1 << 30) - (300 << 20))
    with pytest.raises(shmload.MemoryLimitExceeded, match="the memory control group leaves 0"):
        shmload.warm(large, dtype="bfloat16", progress=never)


@decoding_door
def test_no_room_in_the_machine(large, door, tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100000 kB\nMemAvailable: 71680 kB\n")
    read = functools.partial(machine_free_nbytes, meminfo)
    monkeypatch.setattr(eviction, "machine_free_nbytes", read)
    refusal(
        door,
        large,
        shmload.MemoryLimitExceeded,
        "the machine's memory leaves 6.00 MiB",
        "shmload rm",
        progress=never,
    )


def test_what_takes_no_room_needs_none(checkpoint, evicts, monkeypatch):
    shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    monkeypatch.setattr(eviction, "shm_free_nbytes", lambda: 0)
    shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    state_dict(checkpoint)  # it maps the file
