"""What a limit of the process forbids is an error that names the limit, and nothing is left."""

import errno
import json
import resource
import sys

import numpy as np
import pytest
import torch
from children import limited, run_to_end
from doors import decoding_door, refusal
from safetensors.numpy import save_file

import shmload
from shmload._decoding.worker_process import WorkerProcess
from shmload._host import procs


@pytest.fixture
def many(tmp_path, evicts):
    """A checkpoint of 100 shards."""
    folder = tmp_path / "many"
    folder.mkdir()
    names = {f"t{number}": f"model-{number + 1:05}-of-00100.safetensors" for number in range(100)}
    for number, (tensor, name) in enumerate(names.items()):
        save_file({tensor: np.full(4, number, np.float32)}, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text("{}")
    return folder


@decoding_door
def test_size_of_files(checkpoint, shm_names, door):
    words = (checkpoint, "RLIMIT_FSIZE is 1000", "ulimit -f unlimited")
    with limited(resource.RLIMIT_FSIZE, 1000):
        refusal(door, checkpoint, shmload.CapacityError, *words)
    assert shm_names() == []


MANY = """
import os, resource, sys
import shmload
source, is_hard = sys.argv[1], sys.argv[2] == "hard"
soft, hard = len(os.listdir("/proc/self/fd")) + 70, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft if is_hard else hard))
try:
    state = shmload.load_state_dict(source, "float16", keep=True)
    print("LOADED", len(state), flush=True)
except shmload.CapacityError as exc:
    print("REFUSED", exc.limit, exc.available == soft, exc, flush=True)
"""


def test_many_shards_raise_the_soft_limit_of_open_files(many, child):
    assert child(MANY, many, "soft").expect("LOADED") == "100"


def test_hard_limit_of_open_files_is_named_with_the_remedy(many, child, shm_names):
    said = child(MANY, many, "hard").expect("REFUSED")
    assert said.startswith("RLIMIT_NOFILE True ")
    assert "too many open files" in said
    assert "ulimit -n 65536" in said
    assert shm_names() == []


RECALL = """
import os, resource, sys
import diffusers, shmload
name, (source, sharded) = "AutoencoderKL", sys.argv[1:]
diffusers.AutoencoderKL.from_pretrained(source).save_pretrained(sharded, max_shard_size="2KB")
shmload.publish(shmload.load_model(name, sharded, keep=True), "vae")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
print("RECALLED", type(shmload.load_model(name, "shm:vae")).__name__, flush=True)
"""


@pytest.mark.libraries
def test_recall_raises_the_soft_limit_of_open_files(saved, tmp_path, evicts, child):
    process = child(RECALL, saved("flux") / "vae", tmp_path / "sharded")
    assert process.expect("RECALLED") == "AutoencoderKL"


def test_limit_of_processes_is_named(monkeypatch):
    def fail(*args, **kwargs):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(procs, "start", fail)
    with pytest.raises(shmload.CapacityError, match=r"TasksMax= .* --pids-limit") as caught:
        WorkerProcess()
    assert caught.value.limit == "RLIMIT_NPROC"


@pytest.mark.parametrize("limit_kib", [60_000, 80_000])
def test_address_space(tmp_path, evicts, shm_names, limit_kib):
    # More than is decoded without workers, whose imports fail at other places.
    path = tmp_path / "large.safetensors"
    save_file({"weight": np.zeros(17 << 20, np.float32)}, path)
    command = [sys.executable, "-m", "shmload", "warm", "--quiet", "--dtype", "bfloat16", str(path)]
    done = run_to_end(["sh", "-c", f'ulimit -v {limit_kib}; exec "$@"', "sh", *command])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "there is no memory" in done.stderr
    assert "ulimit -v" in done.stderr
    assert shm_names() == []


@pytest.mark.parametrize("limit_kib", [8 << 20, 32 << 20])
def test_limit_of_data_below_and_above_that_of_the_process_that_describes(
    tmp_path, evicts, limit_kib
):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(8)}, path)
    command = [sys.executable, "-m", "shmload", "warm", "--quiet", str(path)]
    done = run_to_end(["sh", "-c", f'ulimit -d {limit_kib}; exec "$@"', "sh", *command])
    assert (done.returncode, done.stderr) == (0, "")
