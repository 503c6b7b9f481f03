"""Names in /dev/shm taken by another user are not trusted, followed or removed."""

import os
from pathlib import Path

import pytest
import torch
from doors import refusal, state_dict, view

import shmload

SHM = Path("/dev/shm")


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


@pytest.mark.timeout(20)  # opening a FIFO can block forever
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
