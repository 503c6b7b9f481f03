"""Weights on a slow FUSE mount are read ahead, past the page cache, once, and are the same."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from children import run_to_end
from safetensors.torch import save_file

from benchmarks import slow_mount

# Tells what the tensors are by a digest, decoded by workers and in the process itself.
_PROGRAM = """
import hashlib, os, sys
from shmload import load_state_dict
import torch

for inline_nbytes in ("0", str(1 << 30)):
    os.environ["SHMLOAD_INLINE_NBYTES"] = inline_nbytes
    from shmload._settings import settings
    settings.cache_clear()
    tensors = load_state_dict(sys.argv[1], dtype="bfloat16")
    print(hashlib.sha256(tensors["weight"].view(torch.uint8).numpy()).hexdigest(), flush=True)
    del tensors
"""
_ROWS = 12


@pytest.fixture(scope="module")
def unshare():
    """The command before a program that may mount; without root in a user namespace of its own."""
    command = ["unshare", "--mount"]
    if os.geteuid() != 0:
        command += ["--user", "--map-root-user"]
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"this machine lets no FUSE file system be mounted: {exc}")
    return command


@pytest.mark.slow
def test_weights_of_a_slow_mount_are_read_once_in_long_reads(unshare, tmp_path):
    weight = torch.randn(_ROWS, 1 << 18, generator=torch.Generator().manual_seed(0))
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    save_file({"weight": weight}, source / "model.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, target / "model.safetensors"]
    done = run_to_end([*unshare, sys.executable, slow_mount.__file__, source, target, *command])
    assert done.returncode == 0, done.stderr
    *digests, last = done.stdout.splitlines()
    wanted = weight.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert digests == [hashlib.sha256(wanted).hexdigest()] * 2
    reads = {int(nbytes): count for nbytes, count in json.loads(last)["reads"].items()}
    # Each load reads three blocks to find out how, and then each block once.
    assert reads[1 << 20] >= 2 * _ROWS
    assert sum(nbytes * count for nbytes, count in reads.items()) < 2 * (_ROWS + 6) << 20
