"""Damaged or dangerous skeleton files are not used, and their number is limited."""

import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from comparing import assert_loads_equal

import shmload
from shmload._building import build
from shmload._building.pickling import PickledModels, Unfit, unpickle_models

pytestmark = [pytest.mark.usefixtures("skeletons"), pytest.mark.slow]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, 5)


def open_to_all(path):
    path.chmod(0o666)


def open_folder_to_all(path):
    path.parent.chmod(0o777)


def give_away(path):
    os.chown(path, 65534, 65534)


def link(path):
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


HARMS = [flip, truncate, open_to_all, open_folder_to_all, link]
HARMS += [give_away] if os.geteuid() == 0 else []


def test_harmed_skeleton_is_not_used(saved, built, skeletons, monkeypatch):
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    (path,) = skeletons()
    content = path.read_bytes()
    monkeypatch.setattr(build, "ask", lambda request: None)  # to make another one takes seconds
    for harm in HARMS:
        built.clear()
        harm(path)
        assert_loads_equal(source, "bf16")
        assert len(built) == 1, harm.__name__
        path.unlink(missing_ok=True)
        path.parent.chmod(0o700)
        path.write_bytes(content)
        path.chmod(0o600)
    built.clear()
    assert_loads_equal(source, "bf16")
    assert built == []  # it was the harm each time


class _Runs:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.mkdir, "made"),
        (eval, "__import__('os').mkdir('made')"),
        (shutil.copy, "/etc/hostname", "made"),
        (getattr, "text", "upper"),
    ],
    ids=["os", "builtin", "shutil", "attribute"],
)
def test_pickle_of_other_packages_is_unfit(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    pickled = PickledModels(tensors=[], models=pickle.dumps(_Runs(*call)))
    with pytest.raises(Unfit):
        unpickle_models(pickled, [])
    assert not Path("made").exists()


@pytest.mark.parametrize("name", ["builtins.eval", "os.mkdir"])
def test_name_inside_a_module_is_no_way_to_another(name):
    # PROTO 4, two SHORT_BINUNICODE, STACK_GLOBAL, STOP
    code = b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(Unfit):
        unpickle_models(PickledModels(tensors=[], models=code), [])


def test_another_environment_with_the_same_packages_has_its_own(
    saved, built, skeletons, monkeypatch
):
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert len(built) == len(skeletons()) == 2
