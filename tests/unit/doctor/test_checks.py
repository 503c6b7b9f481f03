"""Each check grades its facts, and a bad grade comes with a command that helps."""

import resource
import shlex

import pytest

from shmload._doctor import checks
from shmload._doctor.speed import CopySpeed, ReadSpeed
from shmload._host.procfs import FileSystem
from shmload._host.reading import Facts, Reading
from shmload._segments.eviction import Budget

GIB = 1 << 30
TMPFS = FileSystem("tmpfs", ("rw", "size=24684096k", "huge=within_size"))
SMALL_PAGES = FileSystem("tmpfs", ("rw", "size=24684096k"))
NFS = FileSystem("nfs4", ("rw", "vers=4.2"))
EXT4 = FileSystem("ext4", ("rw",))


def read(gb_per_s, *, cached=False, nbytes=256 << 20):
    return ReadSpeed(nbytes, nbytes / gb_per_s / 1e9, cached, Facts(nbytes=nbytes))


def copies(pinned_gb_per_s):
    return checks.device(0, CopySpeed("NVIDIA H200", 3e9, pinned_gb_per_s * 1e9))


# Each check: its facts, the expected state, words of the detail, words of the remedy.
CASES = {
    "room": (checks.shared_memory(TMPFS, 24 * GIB, 23 * GIB, True), "ok", "23.00 GiB free", ""),
    "docker": (checks.shared_memory(TMPFS, 64 << 20, 64 << 20, True), "bad", "", "size=90%"),
    "enough": (
        checks.shared_memory(TMPFS, 64 << 20, 60 << 20, True, 1 << 20),
        "ok",
        "the source takes 1.00 MiB",
        "",
    ),
    "enough-when-idle-ones-go": (
        checks.shared_memory(TMPFS, 9 * GIB, 3 * GIB, True, 5 * GIB, 2 * GIB),
        "ok",
        "3.00 GiB free of 9.00 GiB at /dev/shm, 2.00 GiB more of idle models; the source takes 5",
        "",
    ),
    "group-when-idle-ones-go": (checks.control_group(GIB, 9 * GIB, 2 * GIB, GIB), "ok", "more", ""),
    "memory-when-idle-ones-go": (checks.machine_memory(GIB, 2 * GIB, GIB), "ok", "more", ""),
    "too-little": (
        checks.shared_memory(TMPFS, 9 * GIB, 3 * GIB, True, 30 * GIB),
        "bad",
        "the source takes 30.00 GiB",
        "remount",
    ),
    "enough-in-group": (checks.control_group(GIB, 9 * GIB, GIB), "ok", "1.00 GiB free", ""),
    "too-little-memory": (checks.machine_memory(GIB, 2 * GIB), "bad", "takes 2.00 GiB", "ps -eo"),
    "logout": (checks.logout(False), "ok", "stay", ""),
    "logout-removes": (checks.logout(True), "warn", "RemoveIPC", "enable-linger"),
    "small": (checks.shared_memory(TMPFS, 2 * GIB, 2 * GIB, True), "warn", "", "remount"),
    "small-and-full": (checks.shared_memory(TMPFS, 2 * GIB, 0, True), "bad", "0 B free", "du -ah"),
    "full": (checks.shared_memory(TMPFS, 24 * GIB, 0, True), "bad", "0 B free", "shmload gc"),
    "disk": (checks.shared_memory(EXT4, GIB, GIB, True), "bad", "ext4 at", "mount -t tmpfs"),
    "closed": (checks.shared_memory(TMPFS, 9 * GIB, 9 * GIB, False), "bad", "not write", "chmod"),
    "hidden": (checks.shared_memory(None, 9 * GIB, 9 * GIB, True), "ok", "9.00 GiB", ""),
    "huge": (checks.huge_pages(TMPFS, "never"), "ok", "huge=within_size at", ""),
    "not-huge": (checks.huge_pages(SMALL_PAGES, "deny"), "ok", "huge=never at", ""),
    "overruled": (checks.huge_pages(TMPFS, "deny"), "warn", "deny in", "tee /sys/kernel"),
    "huge-unknown": (checks.huge_pages(None, None), "ok", "unknown in", ""),
    "clean": (checks.leftovers([]), "ok", "none", ""),
    "leftovers": (checks.leftovers(["a", "b"]), "warn", "2 for", "shmload gc"),
    "outdated": (checks.leftovers([], 1), "warn", "1 B pinned", "shmload unpin NAME; shmload gc"),
    "no-limit": (checks.control_group(None, None), "ok", "no memory limit", ""),
    "group": (checks.control_group(8 * GIB, 9 * GIB), "ok", "8.00 GiB free of 9.00 GiB", ""),
    "tight-group": (checks.control_group(GIB, 9 * GIB), "warn", "1.00 GiB", "docker update"),
    "full-group": (checks.control_group(0, 9 * GIB), "bad", "0 B free", "shmload gc"),
    "memory": (checks.machine_memory(8 * GIB), "ok", "8.00 GiB available", ""),
    "little-memory": (checks.machine_memory(GIB), "warn", "1.00 GiB", "shmload gc"),
    "no-memory": (checks.machine_memory(1), "bad", "1 B", "ps -eo"),
    "locked": (checks.locked_memory(8 << 20), "ok", "8.00 MiB", ""),
    "locked-any": (checks.locked_memory(resource.RLIM_INFINITY), "ok", "no limit", ""),
    "locked-little": (checks.locked_memory(64 << 10), "warn", "64.00 KiB", "prlimit"),
    "page-locks": (checks.pinned_pages(GIB, [GIB // 2]), "ok", "at most 1.00 GiB", ""),
    "page-locks-none": (checks.pinned_pages(0, []), "ok", "at most 0 B", ""),
    "page-locks-many": (
        checks.pinned_pages(GIB, [1, GIB - 4096]),
        "warn",
        "a process pins 1024.00 MiB",
        "SHMLOAD_PAGE_LOCKED=2047MiB",
    ),
    "files": (checks.open_files(1024, 4096), "ok", "1024", ""),
    "files-any": (checks.open_files(resource.RLIM_INFINITY, -1), "ok", "no limit", ""),
    "files-few": (checks.open_files(256, 4096), "warn", "256", "ulimit -Sn 4096"),
    "files-few-of-any": (checks.open_files(256, -1), "warn", "256", "ulimit -Sn 65536"),
    "files-too-few": (checks.open_files(64, 256), "bad", "64", "sudo prlimit"),
    "kernel": (checks.kernel("6.8.0-45-generic", True), "ok", "6.8.0-45", ""),
    "unknown-kernel": (checks.kernel("odd", True), "ok", "odd", ""),
    "old-kernel": (checks.kernel("4.18.0-553.el8", True), "bad", "5.4 or later", "reboot"),
    "sandbox": (checks.kernel("5.15.0", False), "bad", "pidfd_open", "libseccomp2"),
    "local": (
        checks.source("m", [GIB, GIB], [EXT4]),
        "ok",
        "2.00 GiB in 2 files on ext4, local",
        "",
    ),
    "remote": (checks.source("my m", [GIB], [EXT4, NFS]), "warn", "remote", "shmload warm 'my m'"),
    "unknown": (checks.source("m", [GIB], [None]), "ok", "unknown file system", ""),
    "empty": (checks.source("m", [], []), "bad", "no safetensors", "ls -lRL m"),
    "disk-speed": (checks.read_speed("m", read(2.5), 1, 3), "ok", "2.50 GB/s, 256.00 MiB not", ""),
    "slow-disk": (
        checks.read_speed("m", read(0.2), 0, 3),
        "warn",
        "0 of 3 files are",
        "shmload warm m",
    ),
    "cached": (checks.read_speed("m", read(5, cached=True), 3, 3), "ok", "MiB from the page", ""),
    "slow-cache": (checks.read_speed("m", read(0.7, cached=True), 3, 3), "warn", "0.70", "warm"),
    "reading-memory": (
        checks.reading(Reading(0, False, "it is in memory"), 1),
        "ok",
        "one worker reads 1 MiB when it needs it, through the page cache: it is in memory",
        "",
    ),
    "reading-mount": (
        checks.reading(Reading(13, True, "a read of 1 MiB took 10.2 ms"), 2),
        "ok",
        "each of 2 workers keeps 13 reads of 1 MiB under way, past the page cache: a read of",
        "",
    ),
    "too-small": (checks.read_speed("m", read(0.1, nbytes=4096), 0, 1), "ok", "4.00 KiB", ""),
    "device": (copies(55), "ok", "NVIDIA H200, copies at 3.0 GB/s from pageable and 55.0", ""),
    "slow-device": (copies(1.5), "warn", "1.5 GB/s from pinned", "nvidia-smi --id=0"),
}


@pytest.mark.parametrize(("judgement", "state", "detail", "remedy"), CASES.values(), ids=CASES)
def test_check_grades_what_it_is_given_and_names_a_command(judgement, state, detail, remedy):
    found, said, command = judgement
    assert found == state
    assert detail in said
    if state != "ok":
        assert remedy in command
        assert shlex.split(command, comments=True)  # raises if a quote is open
        assert "\n" not in command


def test_room_in_a_budget_is_what_is_free_and_what_is_idle():
    budget = Budget(4 * GIB, "the service's budget", ("raise it",))
    state, detail, _ = checks.budget(budget, resident=3 * GIB, needed=2 * GIB, idle=GIB)
    assert state == "ok"
    assert detail.startswith("1.00 GiB free of 4.00 GiB, the service's budget, 1.00 GiB more")
    assert checks.budget(budget, 3 * GIB, 2 * GIB, idle=0)[0] == "bad"
    assert checks.budget(budget, resident=9 * GIB, needed=GIB, idle=5 * GIB)[0] == "bad"
    assert checks.budget(None, 3 * GIB)[0] == "ok"


def test_too_little_room_says_by_what_it_is_judged():
    assert checks.machine_memory(GIB)[1].endswith("; a small pipeline takes 2.51 GiB")
    assert checks.machine_memory(1 << 20)[1].endswith("; almost no model fits")
