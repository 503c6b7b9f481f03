"""Facts are parsed from /proc and /sys, in made-up files of every kind and the kernel's."""

import mmap
import os

import pytest

from shmload._host.descriptors import Inode, inode_of
from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import (
    cgroup_free_nbytes,
    file_system,
    is_remote,
    machine_free_nbytes,
    mappers,
)
from shmload._host.shm import shm_unlink
from shmload.errors import ShmloadError

# File systems -------------------------------------------------------------------------------------


@pytest.fixture
def mountinfo(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(
        "24 1 0:23 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a\\040b\n"
        "25 24 0:24 / /dev/shm rw - tmpfs  rw,size=64k,huge=within_size\n"
        "26 24 0:51 / /mnt rw master:1 propagate_from:2 - nfs4 host:/x rw,vers=4.2\n"
        "27 24 8:1 / /home rw - ext4 /dev/sda1 rw\n"
        "28 24 0:52 / /net\\040drive rw - fuse.sshfs server:/x rw\n"
    )
    return path


@pytest.mark.parametrize(
    ("device", "kind", "remote"),
    [
        (os.makedev(0, 24), "tmpfs", False),
        (os.makedev(0, 51), "nfs4", True),
        (os.makedev(0, 52), "fuse.sshfs", True),
        (os.makedev(8, 1), "ext4", False),
        (os.makedev(8, 2), "", False),
    ],
)
def test_file_system_is_found_by_its_device(mountinfo, device, kind, remote):
    assert file_system(device, mountinfo) == kind
    assert is_remote(kind) == remote


# Memory -------------------------------------------------------------------------------------------


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
    cgroups.add("memory/docker/box", 9223372036854771712, 400)  # cgroup v1's "no limit"
    assert cgroups.free is None
    cgroups.add("memory/docker", 1000, 900, total_inactive_file=60, inactive_file=5)
    assert cgroups.free == 160
    cgroups.add("box", 150, 100)
    assert cgroups.free == 50


# Mappings -----------------------------------------------------------------------------------------


def test_processes_that_map_a_file_are_found_by_inode(fd, name):
    os.ftruncate(fd, PAGE_NBYTES)
    inode = inode_of(os.fstat(fd))
    assert mappers([]) == mappers([inode]) == {}
    with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY):
        assert mappers([inode, Inode(inode.device, 1)]) == {inode: {os.getpid()}}
        shm_unlink(name)
        assert mappers([inode]) == {inode: {os.getpid()}}
    assert mappers([inode]) == {}
