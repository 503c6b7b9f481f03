"""A skeleton is not used, or is made again, where it would differ from the libraries' model."""

import functools
import hashlib
import json
import os
import shutil

import diffusers
import pytest
import torch
from comparing import assert_component_equal, assert_loads_equal, reference
from safetensors.torch import load_file, save_file
from traces import Messages

import shmload
from shmload._building import build

pytestmark = [pytest.mark.usefixtures("skeletons"), pytest.mark.slow]

# Models without a skeleton ------------------------------------------------------------------------


def test_models_that_were_warned_of_are_warned_of_again(copied, built, skeletons):
    source = copied("stable-diffusion")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"left.over": torch.ones(3)}, path, {"format": "pt"})
    for _ in range(2):
        assert_loads_equal(source, "bf16")  # the warning too
    assert (len(built), len(skeletons())) == (1, 1)


def test_weights_that_are_in_no_file_are_drawn_again(copied, built, skeletons):
    source = copied("stable-diffusion")
    path = source / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith("fc1.weight"))]
    save_file(tensors, path, {"format": "pt"})
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert (len(built), skeletons()) == (2, [])


def test_component_that_is_left_out_is_left_out(saved, built):
    source = saved("stable-diffusion")
    for _ in range(2):
        assert assert_loads_equal(source, "bf16", safety_checker=None).safety_checker is None
    assert len(built) == 1
    assert shmload.load_pipeline(source, torch_dtype=torch.bfloat16).safety_checker is not None
    assert len(built) == 2


def test_component_that_is_passed_in_is_used(saved, built):
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    vae = diffusers.AutoencoderKL.from_pretrained(source / "vae")
    assert shmload.load_pipeline(source, torch_dtype=torch.bfloat16, vae=vae).vae is vae
    assert len(built) == 2


@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [("from_pretrained", False), ("from_pretrained", True), ("__init__", True)],
)
def test_what_the_libraries_were_patched_to_do_is_done(
    saved, built, skeletons, monkeypatch, name, is_wrapped
):
    plain = vars(diffusers.AutoencoderKL).get(name) or diffusers.ModelMixin.from_pretrained.__func__

    def patched(first, *args, **kwargs):
        model = plain(first, *args, **kwargs) or first
        object.__setattr__(model, "mark", "patched")
        return None if name == "__init__" else model

    if is_wrapped:
        patched = functools.wraps(plain)(patched)
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    (made,) = skeletons()
    with monkeypatch.context() as patch:
        method = patched if name == "__init__" else classmethod(patched)
        patch.setattr(diffusers.AutoencoderKL, name, method)
        for number in range(2):
            pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
            assert (pipe.vae.mark, len(built)) == ("patched", number + 2)
    assert skeletons() == [made]
    assert not hasattr(shmload.load_pipeline(source, torch_dtype=torch.bfloat16).vae, "mark")
    assert len(built) == 3


def test_layer_that_was_replaced_is_not_mistaken(saved, built, monkeypatch):
    class Other(torch.nn.Linear):
        pass

    source = saved("flux")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    Other.__name__ = "Linear"
    monkeypatch.setattr(torch.nn, "Linear", Other)
    assert_loads_equal(source, "bf16")
    assert len(built) == 2


def test_silence_is_not_remembered(copied):
    source = copied("stable-diffusion")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"left.over": torch.ones(3)}, path, {"format": "pt"})
    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    try:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    finally:
        diffusers.utils.logging.set_verbosity(level)
    with Messages() as said:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert any("left.over" in text for _, text in said.texts)


def test_inference_mode_makes_what_the_library_makes(saved, skeletons):
    source = saved("stable-diffusion")
    with torch.inference_mode():
        got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
        wanted = reference(source, torch.bfloat16)
    for name in ("unet", "text_encoder"):
        flags = [
            [p.is_inference() for p in getattr(pipe, name).parameters()] for pipe in (got, wanted)
        ]
        assert flags[0] == flags[1]
    assert skeletons() == []


def test_setting_turns_it_off(saved, built, skeletons, configure):
    configure(skeletons=0)
    for _ in range(2):
        shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16)
    assert (len(built), skeletons()) == (2, [])


# Changes that need a new skeleton -----------------------------------------------------------------


def change_config(source, monkeypatch, tmp_path):
    path = source / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scaling_factor": 0.5}))


def change_shard(source, monkeypatch, tmp_path):
    path = source / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: t + 1 for name, t in load_file(path).items()}, path, {"format": "pt"})


def install_something(source, monkeypatch, tmp_path):
    (tmp_path / "site" / "flash_attn-3.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")


def set_variable(source, monkeypatch, tmp_path):
    monkeypatch.setenv("DIFFUSERS_GC_CHECKPOINTS", "1")


def ask_no_more(monkeypatch):
    """Have loads make no further skeleton, which takes seconds."""
    monkeypatch.setattr(build, "ask", lambda request: None)


@pytest.mark.parametrize(
    "change",
    [change_config, change_shard, install_something, set_variable],
    ids=lambda f: f.__name__,
)
def test_change_is_not_overlooked(copied, built, monkeypatch, tmp_path, change):
    source = copied("stable-diffusion")
    assert_loads_equal(source, "bf16")
    ask_no_more(monkeypatch)
    change(source, monkeypatch, tmp_path)
    assert_loads_equal(source, "bf16")
    assert len(built) == 2


def test_source_that_moved_speaks_of_itself(copied, built, monkeypatch):
    source = copied("stable-diffusion")
    assert_loads_equal(source, "bf16")
    ask_no_more(monkeypatch)
    assert_loads_equal(source.rename(source.with_name("moved")), "bf16")
    assert len(built) == 2


# Sources that are reached by links ----------------------------------------------------------------


@pytest.fixture(params=["plain", "file links", "folder link", "link of a link", "hub cache"])
def vae(request, saved, tmp_path, hub_cache):
    """A model in one form of links; return its folder, and what gives a file new content."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(saved("stable-diffusion") / "vae", there)

    def rewrite(name, content):
        path = here / name
        before = os.stat(path)
        if request.param == "hub cache":  # a blob never changes: the link leads to another one
            blob = path.resolve().with_name(hashlib.sha256(content).hexdigest())
            path.unlink()
            path.symlink_to(blob)
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` does

    match request.param:
        case "plain":
            here = there
        case "file links":
            here.mkdir()
            for path in there.iterdir():
                (here / path.name).symlink_to(path)
        case "folder link":
            here.symlink_to(there)
        case "link of a link":
            (tmp_path / "between").symlink_to(there)
            here.symlink_to(tmp_path / "between")
        case "hub cache":
            here = hub_cache.add("org/name", there)
    return here, rewrite


def test_change_behind_a_link_is_noticed(vae, built):
    folder, rewrite = vae

    def load():
        got = shmload.load_model(diffusers.AutoencoderKL, folder, dtype="bfloat16")
        wanted = diffusers.AutoencoderKL.from_pretrained(folder, torch_dtype=torch.bfloat16)
        assert_component_equal(got, wanted, "model")
        return len(built)

    assert (load(), load()) == (1, 1)
    config = (folder / "config.json").read_bytes()
    rewrite("config.json", config.replace(b'"scaling_factor": 0.1', b'"scaling_factor": 0.2'))
    assert (load(), load()) == (2, 2)
    (weights,) = folder.glob("*.safetensors")
    content = weights.read_bytes()
    rewrite(weights.name, content[:-1] + bytes([content[-1] ^ 1]))
    assert (load(), load()) == (3, 3)
