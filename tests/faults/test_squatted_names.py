"""Names in /dev/shm taken by another user are not trusted, followed or removed.

tests/unit/host/test_kernel_answers.py has every kind of name; here two go through the doors.
"""

import contextlib
import gc
import os
from pathlib import Path

import pytest
import torch
from doors import refusal
from safetensors.torch import load_file

import shmload
from shmload._segments.names import lock_name

SHM = Path("/dev/shm")


def squat_link(path, victim):
    path.symlink_to(victim)


def squat_as_somebody_else(path, victim):
    path.write_bytes(b"evil")
    path.chmod(0o600)
    os.chown(path, 65534, 65534)


every_squat = pytest.mark.parametrize(
    "squat",
    [
        squat_link,
        pytest.param(
            squat_as_somebody_else,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)


@pytest.fixture
def victim(tmp_path):
    """A file that a planted link leads to, and that stays as it is."""
    path = tmp_path / "victim"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"


@pytest.fixture
def planned(checkpoint):
    return shmload.plan(checkpoint, torch_dtype=torch.bfloat16, keep=True).shards[0]


@pytest.fixture
def untouched(shm_names):
    """Check that the names which a test has planted are there, unchanged, and no other."""

    @contextlib.contextmanager
    def check(*names):
        before = [facts(name) for name in names]
        yield
        assert [facts(name) for name in names] == before
        assert shm_names() == sorted(names)

    return check


def facts(name):
    found = os.lstat(SHM / name)
    return found.st_ino, found.st_mode, found.st_size


@pytest.mark.timeout(20)  # opening a FIFO can block forever
@pytest.mark.parametrize("suffix", ["", ".part"])
@every_squat
def test_load_that_needs_a_squatted_name_is_refused(
    checkpoint, planned, evicts, victim, untouched, squat, suffix
):
    name = planned.segment + suffix
    squat(SHM / name, victim)
    with untouched(name):
        refusal(
            shmload.warm,
            checkpoint,
            shmload.SegmentUntrusted,
            f"/dev/shm/{name}",
            "ask its owner to remove it",
        )
        assert shmload.segments() == shmload.collect_garbage() == []


@pytest.mark.timeout(20)
@every_squat
def test_private_load_does_without_squatted_names(
    checkpoint, planned, evicts, victim, untouched, squat, caplog
):
    names = [planned.segment, planned.segment + ".part", lock_name("room")]
    for name in names:
        squat(SHM / name, victim)
    expected = load_file(checkpoint)["a"].bfloat16()
    with untouched(*names):
        state = shmload.load_state_dict(checkpoint, "bfloat16")
        assert torch.equal(state["a"], expected)
        with shmload.view(checkpoint, dtype="bfloat16") as path:
            assert torch.equal(load_file(path)["a"], expected)
        del state
        gc.collect()
    assert "this process decodes for itself alone" in caplog.text
