"""The core loads without the islands: what leans on it by its doors, and nothing leans on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shmload

ISLANDS = {
    "data-prep": ("integrations/dataprep",),
    "Ray": ("integrations/ray.py",),
    "redirect": ("_redirecting", "integrations/redirect.py"),
    "doctor": ("_doctor",),
    "templates": ("_templates",),
}
_LOAD = """
import sys
import diffusers, torch
import shmload
assert shmload.__file__.startswith(sys.argv[1]), shmload.__file__
shmload.warm(sys.argv[2], dtype="bfloat16")
pipeline = shmload.load_pipeline(sys.argv[2], dtype="bfloat16")
wanted = diffusers.DiffusionPipeline.from_pretrained(sys.argv[2], torch_dtype=torch.bfloat16)
for name, part in wanted.components.items():
    if isinstance(part, torch.nn.Module):
        state = pipeline.components[name].state_dict()
        assert all(torch.equal(state[key], value) for key, value in part.state_dict().items())
assert shmload.load_model(type(pipeline.unet), sys.argv[2], subfolder="unet", dtype="bfloat16")
assert shmload.models() and shmload.segments()
"""


@pytest.fixture
def without(tmp_path):
    """Copy the package without some islands, and return the environment that imports it."""

    def copy(*islands):
        target = tmp_path / "shmload"
        shutil.copytree(
            Path(shmload.__file__).parent, target, ignore=shutil.ignore_patterns("__pycache__")
        )
        for path in (path for island in islands for path in ISLANDS[island]):
            gone = target / path
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        return os.environ | {"PYTHONPATH": str(tmp_path)}

    return copy


@pytest.mark.slow
def test_pipelines_and_models_are_loaded_without_any_island(without, saved, evicts, tmp_path):
    environment = without(*ISLANDS)
    command = [sys.executable, "-P", "-c", _LOAD, tmp_path, saved("stable-diffusion")]
    subprocess.run(command, env=environment, check=True, timeout=100)


@pytest.mark.parametrize("island", ISLANDS)
def test_the_command_line_starts_without_an_island(island, without):
    environment = without(island)
    command = [sys.executable, "-P", "-m", "shmload", "ls"]
    subprocess.run(command, env=environment, check=True, timeout=30, stdout=subprocess.DEVNULL)
