"""The room that the file system, the machine and the control group leave, as the kernel has it."""

import os

import pytest

from shmload._errors import ShmloadError
from shmload._linux import (
    cgroup_free_nbytes,
    huge_page_policy,
    machine_free_nbytes,
    shm_free_nbytes,
)


def test_room_is_what_the_file_system_and_the_machine_have():
    found = os.statvfs("/dev/shm")
    assert 0 < shm_free_nbytes() <= found.f_blocks * found.f_frsize
    assert machine_free_nbytes() > 0


def test_machine_without_the_estimate_is_an_error(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8 kB\nMemAvailable:      3 kB\n")
    assert machine_free_nbytes(meminfo) == 3 * 1024
    meminfo.write_text("MemTotal: 8 kB\n")
    with pytest.raises(ShmloadError, match="MemAvailable"):
        machine_free_nbytes(meminfo)


class Cgroups:
    """A made-up control group file system, and the membership of a process in it."""

    def __init__(self, root):
        self.root = root / "cgroup"
        self.membership = root / "membership"
        self.root.mkdir()
        self.membership.write_text("")

    def add(self, group, limit, used, **statistics):
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current")
        if group.split("/")[0] == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for name, value in zip(names, (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        lines = (f"{name} {value}\n" for name, value in statistics.items())
        (folder / "memory.stat").write_text("anon 999999\n" + "".join(lines))

    def join(self, *lines):
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    @property
    def free(self):
        return cgroup_free_nbytes(self.root, self.membership)


@pytest.fixture
def cgroups(tmp_path):
    return Cgroups(tmp_path)


def test_group_leaves_its_limit_less_its_use(cgroups):
    cgroups.join("0::/pod/box")
    cgroups.add("pod/box", 1000, 400)
    assert cgroups.free == 600


def test_page_cache_counts_as_free_and_shared_memory_does_not(cgroups):
    cgroups.join("0::/box")
    cgroups.add("box", 1000, 900, inactive_file=300, active_file=50, shmem=500, inactive_anon=7)
    assert cgroups.free == 450


def test_tightest_ancestor_counts(cgroups):
    cgroups.join("0::/pod/box")
    cgroups.add("pod/box", "max", 400)
    cgroups.add("pod", 500, 450)
    cgroups.add("", 10_000, 400)
    assert cgroups.free == 50


def test_group_over_its_limit_leaves_nothing(cgroups):
    cgroups.join("0::/box")
    cgroups.add("box", 1000, 1200)
    assert cgroups.free == 0


def test_no_limit_is_none(cgroups):
    assert cgroups.free is None
    cgroups.join("0::/box")
    assert cgroups.free is None  # files that are not there
    cgroups.add("box", "max", 400)
    assert cgroups.free is None
    cgroups.membership.unlink()
    assert cgroups.free is None


def test_first_version_is_read_too(cgroups):
    cgroups.join("12:cpu,cpuacct:/box", "5:memory:/docker/box", "1:name=systemd:/box", "0::/box")
    cgroups.add("memory/docker/box", 9223372036854771712, 400)  # how it writes "no limit"
    assert cgroups.free is None
    cgroups.add("memory/docker", 1000, 900, total_inactive_file=60, inactive_file=5)
    assert cgroups.free == 160
    cgroups.add("box", 150, 100)
    assert cgroups.free == 50


def test_group_outside_the_namespace_is_no_error(cgroups):
    cgroups.join("0::/../../box")
    cgroups.add("", 1000, 100)
    assert cgroups.free in (None, 900)


def test_real_group_can_be_read():
    free = cgroup_free_nbytes()
    assert free is None or free >= 0


def test_huge_page_policy_is_the_word_in_brackets(tmp_path):
    path = tmp_path / "shmem_enabled"
    assert huge_page_policy(path) is None
    path.write_text("always within_size advise [never] deny force\n")
    assert huge_page_policy(path) == "never"
