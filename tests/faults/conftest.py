"""Fixtures of the fault tests: small checkpoints, and faults for their loads.

tests/conftest.py checks after each test that no name in /dev/shm and no process is left.
"""

import functools
import json
import sys
import textwrap

import pytest
import torch
from harm import WORKER
from safetensors.torch import save_file

from shmload._host.procfs import cgroup_free_nbytes
from shmload._loading import load
from shmload._segments import eviction

TENSORS = {"a": torch.arange(5000.0).reshape(50, 100), "b": torch.arange(7)}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    return path


@pytest.fixture
def large(tmp_path):
    """A shard of 40 MB; its decoding makes five progress reports, at which a test can interfere."""
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
    """A pipeline of two components whose class is not imported."""
    path = tmp_path / "pipeline"
    index = {"_class_name": "P"}
    for name in ("unet", "vae"):
        (path / name).mkdir(parents=True)
        save_file(TENSORS, path / name / "diffusion_pytorch_model.safetensors")
        index[name] = ["nowhere", "Unknown"]
    (path / "model_index.json").write_text(json.dumps(index))
    return path


# Interference -------------------------------------------------------------------------------------


@pytest.fixture
def before_decoding(monkeypatch):
    """Call a function after the plan and before any weight is read."""

    def install(action):
        decode = load.decode

        def act_and_decode(*args, **kwargs):
            action()
            return decode(*args, **kwargs)

        monkeypatch.setattr(load, "decode", act_and_decode)

    return install


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
        monkeypatch.setattr(eviction, "cgroup_free_nbytes", read)

    return make


@pytest.fixture
def workers_that(monkeypatch, tmp_path, configure):
    """Make workers run some code first; return a function that counts their starts."""

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
