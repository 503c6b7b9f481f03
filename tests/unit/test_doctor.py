"""What the doctor finds, in health and in every illness; and that it only looks."""

import json
import os
import resource
import secrets
import shlex
import socket
import sys
import types
from pathlib import Path

import click.testing
import pytest
import torch
from safetensors.torch import save_file

from shmload import _cli_doctor, _doctor
from shmload._checks import (
    Finding,
    check_control_group,
    check_devices,
    check_huge_pages,
    check_kernel,
    check_leftovers,
    check_locked_memory,
    check_machine_memory,
    check_open_files,
    check_read_speed,
    check_service,
    check_shared_memory,
    check_source,
)
from shmload._doctor import diagnose
from shmload._errors import PeerRefused, ProtocolError, ServiceUnavailable
from shmload._identity import PART_SUFFIX, name_prefix
from shmload._linux import SHM_DIR, shm_open, try_lock
from shmload._procfs import FileSystem
from shmload._protocol import Status
from shmload._residency import collect_garbage, find_garbage
from shmload._speed import CopySpeed, ReadSpeed, is_file_cached, measure_copies, measure_reading

GIB = 1 << 30
TMPFS = FileSystem("tmpfs", ("rw", "size=24684096k", "huge=within_size"))
SMALL_PAGES = FileSystem("tmpfs", ("rw", "size=24684096k"))
NFS = FileSystem("nfs4", ("rw", "vers=4.2"))
EXT4 = FileSystem("ext4", ("rw",))
SOCKET = Path("/run/user/1000/shm load/service.sock")
STATUS = Status(
    pid=42,
    uptime_s=1.0,
    budget_nbytes=1,
    resident_nbytes=0,
    segments=0,
    pinned=0,
    workers=1,
    is_decoding=False,
    waiting=0,
    clients=1,
    hits=0,
    misses=0,
    evictions=0,
    read_nbytes=0,
    decode_s=0.0,
    leases=(),
)


def unavailable(cause=None):
    error = ServiceUnavailable(SOCKET, "a reason")
    error.__cause__ = cause
    return error


def read(gb_per_s, *, cached=False, nbytes=256 << 20):
    return ReadSpeed(nbytes, nbytes / gb_per_s / 1e9, cached)


def copies(pinned_gb_per_s):
    (finding,) = check_devices([CopySpeed("NVIDIA H200", 3e9, pinned_gb_per_s * 1e9)])
    return finding


def no_devices():
    (finding,) = check_devices([])
    return finding


# Each check: what it was given, the state, words of the detail, words of the remedy.
CASES = {
    "room": (check_shared_memory(TMPFS, 24 * GIB, 23 * GIB, True), "ok", "23.00 GiB free", ""),
    "docker": (check_shared_memory(TMPFS, 64 << 20, 64 << 20, True), "bad", "", "size=90%"),
    "small": (check_shared_memory(TMPFS, 2 * GIB, 2 * GIB, True), "warn", "", "remount"),
    "full": (check_shared_memory(TMPFS, 24 * GIB, 0, True), "bad", "0 B free", "shmload gc"),
    "disk": (check_shared_memory(EXT4, GIB, GIB, True), "bad", "ext4 at", "mount -t tmpfs"),
    "closed": (check_shared_memory(TMPFS, 9 * GIB, 9 * GIB, False), "bad", "not write", "chmod"),
    "hidden": (check_shared_memory(None, 9 * GIB, 9 * GIB, True), "ok", "9.00 GiB", ""),
    "huge": (check_huge_pages(TMPFS, "never"), "ok", "huge=within_size at", ""),
    "not-huge": (check_huge_pages(SMALL_PAGES, "deny"), "ok", "huge=never at", ""),
    "overruled": (check_huge_pages(TMPFS, "deny"), "warn", "deny in", "tee /sys/kernel"),
    "huge-unknown": (check_huge_pages(None, None), "ok", "unknown in", ""),
    "clean": (check_leftovers([]), "ok", "none", ""),
    "leftovers": (check_leftovers(["a", "b"]), "warn", "2 for", "shmload gc"),
    "no-limit": (check_control_group(None, None), "ok", "no memory limit", ""),
    "group": (check_control_group(8 * GIB, 9 * GIB), "ok", "8.00 GiB free of 9.00 GiB", ""),
    "tight-group": (check_control_group(GIB, 9 * GIB), "warn", "1.00 GiB", "docker update"),
    "full-group": (check_control_group(0, 9 * GIB), "bad", "0 B free", "shmload gc"),
    "memory": (check_machine_memory(8 * GIB), "ok", "8.00 GiB available", ""),
    "little-memory": (check_machine_memory(GIB), "warn", "1.00 GiB", "shmload gc"),
    "no-memory": (check_machine_memory(1), "bad", "1 B", "ps -eo"),
    "locked": (check_locked_memory(8 << 20), "ok", "8.00 MiB", ""),
    "locked-any": (check_locked_memory(resource.RLIM_INFINITY), "ok", "no limit", ""),
    "locked-little": (check_locked_memory(64 << 10), "warn", "64.00 KiB", "prlimit"),
    "files": (check_open_files(1024, 4096), "ok", "1024", ""),
    "files-any": (check_open_files(resource.RLIM_INFINITY, -1), "ok", "no limit", ""),
    "files-few": (check_open_files(256, 4096), "warn", "256", "ulimit -Sn 4096"),
    "files-few-of-any": (check_open_files(256, -1), "warn", "256", "ulimit -Sn 65536"),
    "files-too-few": (check_open_files(64, 256), "bad", "64", "sudo prlimit"),
    "kernel": (check_kernel("6.8.0-45-generic", True), "ok", "6.8.0-45", ""),
    "unknown-kernel": (check_kernel("odd", True), "ok", "odd", ""),
    "old-kernel": (check_kernel("4.18.0-553.el8", True), "bad", "5.4 or later", "reboot"),
    "sandbox": (check_kernel("5.15.0", False), "bad", "pidfd_open", "libseccomp2"),
    "no-service": (check_service(SOCKET, "auto", None, 0), "ok", "none runs", ""),
    "wanted": (check_service(SOCKET, "require", None, 0), "bad", "none runs", "shmload serve"),
    "service": (check_service(SOCKET, "auto", STATUS, 0.01), "ok", "process 42, protocol", ""),
    "slow-service": (check_service(SOCKET, "auto", STATUS, 3), "warn", "in 3.000 s", "top"),
    "silent": (check_service(SOCKET, "auto", unavailable(), 9), "bad", "a reason", "kill -9"),
    "stale": (
        check_service(SOCKET, "auto", unavailable(ConnectionRefusedError()), 0),
        "warn",
        "is stale",
        f"rm '{SOCKET}'",
    ),
    "stale-and-wanted": (
        check_service(SOCKET, "require", unavailable(ConnectionRefusedError()), 0),
        "bad",
        "is stale",
        "rm",
    ),
    "not-ours": (
        check_service(SOCKET, "auto", unavailable(PermissionError()), 0),
        "bad",
        "a reason",
        "SHMLOAD_SOCKET",
    ),
    "refused": (
        check_service(SOCKET, "auto", PeerRefused("another user's"), 0),
        "bad",
        "another user's",
        "SHMLOAD_SOCKET",
    ),
    "other-version": (
        check_service(SOCKET, "auto", ProtocolError("speaks version 9"), 0),
        "bad",
        "version 9",
        "shmload serve",
    ),
    "local": (
        check_source("m", [GIB, GIB], [EXT4]),
        "ok",
        "2.00 GiB in 2 files on ext4, local",
        "",
    ),
    "remote": (check_source("my m", [GIB], [EXT4, NFS]), "warn", "remote", "shmload warm 'my m'"),
    "unknown": (check_source("m", [GIB], [None]), "ok", "unknown file system", ""),
    "empty": (check_source("m", [], []), "bad", "no safetensors", "ls -lRL m"),
    "disk-speed": (check_read_speed("m", read(2.5), 1, 3), "ok", "2.50 GB/s, 256.00 MiB not", ""),
    "slow-disk": (
        check_read_speed("m", read(0.2), 0, 3),
        "warn",
        "0 of 3 files are",
        "shmload warm m",
    ),
    "cached": (check_read_speed("m", read(5, cached=True), 3, 3), "ok", "MiB from the page", ""),
    "slow-cache": (check_read_speed("m", read(0.7, cached=True), 3, 3), "warn", "0.70", "warm"),
    "too-small": (check_read_speed("m", read(0.1, nbytes=4096), 0, 1), "ok", "4.00 KiB", ""),
    "no-device": (no_devices(), "ok", "no CUDA device", ""),
    "device": (copies(55), "ok", "NVIDIA H200, copies at 3.0 GB/s from pageable and 55.0", ""),
    "slow-device": (copies(1.5), "warn", "1.5 GB/s from pinned", "nvidia-smi --id=0"),
}


@pytest.mark.parametrize(("finding", "state", "detail", "remedy"), CASES.values(), ids=CASES)
def test_check_grades_what_it_is_given_and_names_a_command(finding, state, detail, remedy):
    assert finding.state == state
    assert detail in finding.detail
    if state == "ok":
        assert finding.remedy is None
    else:
        assert remedy in finding.remedy
        assert shlex.split(finding.remedy, comments=True)  # quotes are closed
        assert "\n" not in finding.remedy


# Leftovers ----------------------------------------------------------------------------------------


@pytest.fixture
def part(evicts):
    """A part that its builder has left, and its descriptor."""
    name = f"{name_prefix()}{secrets.token_hex(15)}{PART_SUFFIX}"
    fd = shm_open(name, create=True, writable=True)
    yield name, fd
    os.close(fd)


@pytest.fixture
def view(evicts):
    path = SHM_DIR / f"{name_prefix()}view-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    return path


def test_garbage_is_named_and_stays(part, view):
    os.utime(view, (0, 0))
    names = {part[0], view.name}
    assert names <= set(find_garbage())
    assert names <= set(os.listdir(SHM_DIR))
    assert names <= set(collect_garbage())
    assert not names & set(os.listdir(SHM_DIR))


def test_what_is_in_use_is_no_garbage(part, view):
    name, fd = part
    assert try_lock(fd, exclusive=True)
    assert not {name, view.name} & set(find_garbage())  # the view is younger than a minute


# Measuring ----------------------------------------------------------------------------------------


def test_start_of_a_file_is_read_and_then_cached(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(3 << 20))
    assert measure_reading(path, 2 << 20).nbytes == 2 << 20
    speed = measure_reading(path)
    assert speed.nbytes == 3 << 20
    assert speed.bytes_per_s > 0
    assert speed.was_cached
    assert is_file_cached(path)


class FakeTorch(types.ModuleType):
    """As much of torch as has one device; notes what is copied to it."""

    uint8 = None

    def __init__(self):
        super().__init__("torch")
        self.copied = []
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_name=lambda number: f"Device {number}",
            synchronize=lambda device: None,
        )

    def ones(self, *_, **__):
        return self._tensor("pageable")

    def _tensor(self, kind):
        target = types.SimpleNamespace(copy_=lambda source: self.copied.append(source.kind))
        return types.SimpleNamespace(
            kind=kind,
            nbytes=1000,
            pin_memory=lambda: self._tensor("pinned"),
            to=lambda device: target,
        )


def test_each_device_is_copied_to_from_both_kinds_of_memory(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    (speed,) = measure_copies()
    assert speed.device == "Device 0"
    assert min(speed.pageable_bytes_per_s, speed.pinned_bytes_per_s) > 0
    assert fake.copied == ["pageable"] * 3 + ["pinned"] * 3


def test_machine_without_a_device_copies_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_copies() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_devices_are_measured():
    assert all(speed.pinned_bytes_per_s > 0 for speed in measure_copies())


# The whole ----------------------------------------------------------------------------------------


@pytest.fixture
def no_copies(monkeypatch):
    monkeypatch.setattr(_doctor, "measure_copies", list)


@pytest.fixture
def examine(no_copies, configure, tmp_path):
    """Diagnose with no service in sight, and return the findings by name."""
    configure(socket=tmp_path / "service.sock")
    return lambda *source: {finding.name: finding for finding in diagnose(*source)}


def test_everything_is_examined_and_has_its_say(examine):
    found = examine()
    assert list(found) == [
        "shared memory",
        "huge pages",
        "leftovers",
        "control group",
        "machine memory",
        "locked memory",
        "open files",
        "kernel",
        "service",
        "devices",
    ]
    for finding in found.values():
        assert finding.detail
        assert (finding.state == "ok") == (finding.remedy is None)


def test_source_is_examined_without_being_changed(examine, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(1000.0)}, path)
    found = examine(str(path))
    assert "1 file on" in found["source"].detail
    assert "1 of 1 file is in it" in found["read speed"].detail
    assert found["read speed"].state == "ok"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_source_that_cannot_be_had_is_a_finding(examine, tmp_path, name):
    (tmp_path / "empty").mkdir()
    found = examine(str(tmp_path / name))
    assert found["source"].state == "bad"
    assert "read speed" not in found
    assert "devices" in found


def test_socket_that_nobody_listens_at_is_stale(examine, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
    assert "is stale" in examine()["service"].detail
    assert (tmp_path / "service.sock").exists()


def test_service_that_says_nothing_is_bad_within_a_deadline(examine, configure, tmp_path):
    configure(service_timeout_s=0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
        listener.listen()
        found = examine()["service"]
    assert (found.state, "silent" in found.detail) == ("bad", True)


def test_service_of_another_user_is_bad(examine, monkeypatch, tmp_path):
    monkeypatch.setattr("shmload._endpoint.peer_of", lambda _: (7, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
        listener.listen()
        found = examine()["service"]
    assert (found.state, "SHMLOAD_SOCKET" in found.remedy) == ("bad", True)


def test_machine_without_shared_memory_is_bad(examine, monkeypatch, tmp_path):
    monkeypatch.setattr(_doctor, "SHM_DIR", tmp_path / "missing")
    found = examine()
    assert found["shared memory"].state == "bad"
    assert "leftovers" not in found


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("libcudart.so.12: cannot open\nmore"), "pip install"),
        (RuntimeError("CUDA error: out of memory\nmore"), "nvidia-smi"),
    ],
)
def test_broken_torch_is_a_finding(examine, monkeypatch, error, remedy):
    def fail():
        raise error

    monkeypatch.setattr(_doctor, "measure_copies", fail)
    found = examine()["devices"]
    assert found.state == "bad"
    assert remedy in found.remedy
    assert "more" not in found.detail


def test_torch_need_not_be_there(examine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert examine()["devices"] == Finding("devices", "ok", "torch is not installed")


# The command --------------------------------------------------------------------------------------

WARNING = Finding("huge pages", "warn", "huge=never", "sudo mount")
HEALTH = Finding("kernel", "ok", "Linux 6.8")


@pytest.fixture
def run(monkeypatch):
    """Run the command on given findings; returns its exit code and output."""

    def run_on(*findings, arguments=()):
        monkeypatch.setattr(_cli_doctor, "diagnose", lambda source: iter(findings))
        done = click.testing.CliRunner().invoke(_cli_doctor.doctor_command, arguments)
        return done.exit_code, done.output

    return run_on


def test_findings_are_aligned_with_their_remedies_below(run):
    code, output = run(HEALTH, WARNING)
    assert code == 0
    assert output.splitlines() == [
        "ok    kernel          Linux 6.8",
        "warn  huge pages      huge=never",
        "                      sudo mount",
    ]


def test_json_is_a_list_of_findings(run):
    code, output = run(HEALTH, WARNING, arguments=["--json"])
    assert code == 0
    assert json.loads(output) == [
        {"name": "kernel", "state": "ok", "detail": "Linux 6.8", "remedy": None},
        {"name": "huge pages", "state": "warn", "detail": "huge=never", "remedy": "sudo mount"},
    ]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_what_is_bad_is_the_exit_code(run, arguments):
    assert run(Finding("kernel", "bad", "old", "reboot"), HEALTH, arguments=arguments)[0] == 1
