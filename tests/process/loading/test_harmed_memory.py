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


@pytest.fixture
def load(saved, configure, tmp_path):
    """Return what loads a model, by a rule that is remembered, and compares it."""
    vae = {"subfolder": "vae", "torch_dtype": torch.bfloat16}
    source = saved("stable-diffusion")
    wanted = diffusers.AutoencoderKL.from_pretrained(source, **vae).state_dict()

    def load(cache_dir=tmp_path / "cache"):
        configure(cache_dir=cache_dir)
        got = shmload.load_model("AutoencoderKL", source, **vae).state_dict()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)

    return load


def remembered():
    """Return the sizes of all files in the cache, but for locks."""
    files = (settings().cache_dir / "rules").glob("[!l]*")
    return {path: path.stat().st_size for path in files}


def test_harmed_rules_are_not_believed_and_are_written_anew(load):
    load()
    # Only root gives files away.
    for harm in ("truncate", "give away")[: 1 + (os.geteuid() == 0)]:
        before = remembered()
        assert before
        for path, nbytes in before.items():
            if harm == "truncate":
                os.truncate(path, nbytes // 2)
            else:
                os.chown(path, 65534, 65534)
        load()
        assert remembered() == before
        assert {(path.stat().st_uid, path.stat().st_mode & 0o777) for path in before} == {
            (os.geteuid(), 0o600)
        }


def test_loads_go_on_while_everything_is_removed_again_and_again(load, monkeypatch):
    read = Memo.read

    def read_and_remove(memo, **given):
        found = read(memo, **given)
        shutil.rmtree(settings().cache_dir, ignore_errors=True)
        return found

    monkeypatch.setattr(Memo, "read", read_and_remove)
    load()


def test_loads_go_on_where_nothing_can_be_written(load):
    load(cache_dir="/proc/nowhere")
