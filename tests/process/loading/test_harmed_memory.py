"""Whatever happens to what is remembered on disk, loads go on, and give what the library gives."""

import os
import shutil

import diffusers
import pytest
import torch

import shmload
from shmload._host.memo import Memo
from shmload._settings import settings

pytestmark = pytest.mark.libraries

_STORES = {"rules"}


@pytest.fixture
def load(saved, configure, tmp_path, evicts):
    """Return what makes loads that use every store, and compares what they give."""
    source = saved("stable-diffusion")
    place = {"cache_dir": tmp_path / "cache"}
    vae = {"subfolder": "vae", "torch_dtype": torch.bfloat16}
    wanted = diffusers.AutoencoderKL.from_pretrained(source, **vae).state_dict()

    def load_all(**given):
        configure(**(place | given))
        got = shmload.load_model("AutoencoderKL", source, **vae).state_dict()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        pipe = shmload.load_pipeline(
            source, dtype="bfloat16", pipeline_class="StableDiffusionPipeline"
        )
        got = pipe.vae.state_dict()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)

    return load_all


def give_away(path):
    os.chown(path, 65534, 65534)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def remembered():
    """Return all files in the cache, but for locks."""
    files = [path for path in settings().cache_dir.rglob("*") if path.is_file()]
    return {path for path in files if not path.name.startswith("lock")}


@pytest.mark.slow
def test_harmed_stores_are_not_believed_and_are_written_anew(load):
    load()
    assert {path.parent.name for path in remembered()} == _STORES
    # Only root gives files away.
    for harm in [truncate, *([give_away] if os.geteuid() == 0 else [])]:
        before = {path: path.stat().st_size for path in remembered()}
        for path in before:
            harm(path)
        load()
        for path, nbytes in before.items():
            found = path.stat()
            assert (found.st_uid, found.st_mode & 0o777) == (os.geteuid(), 0o600), harm
            assert found.st_size > nbytes // 2, (harm, path)


@pytest.mark.slow
def test_loads_go_on_while_everything_is_removed_again_and_again(load, monkeypatch):
    read = Memo.read

    def read_and_remove(memo, **given):
        found = read(memo, **given)
        shutil.rmtree(settings().cache_dir, ignore_errors=True)
        return found

    monkeypatch.setattr(Memo, "read", read_and_remove)
    load()


@pytest.mark.slow
def test_loads_go_on_where_nothing_can_be_written(load):
    load(cache_dir="/proc/nowhere")
