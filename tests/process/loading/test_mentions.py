"""Messages and objects have the user's paths, never paths of a view."""

import re
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from comparing import assert_equal, assert_loads_equal, from_pretrained, reference
from traces import Messages, mentions_of_view

import shmload

pytestmark = pytest.mark.libraries


def test_the_search_for_mentions_finds_what_is_hidden():
    secret = f"/dev/shm/{'shmload'}-view"
    module = torch.nn.Linear(1, 1)
    module.hidden = [{"a": (Path(secret),)}]
    module.register_forward_hook(lambda *_: secret)
    assert secret in mentions_of_view(module)
    module.hidden = None
    assert secret in mentions_of_view(module)
    assert not mentions_of_view(torch.nn.Linear(1, 1))


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"unet": None}], ids=["loaded", "passed"])
def test_variant_in_files_with_deprecated_names_is_warned_about(saved, tmp_path, given):
    source = tmp_path / "old"
    shutil.copytree(saved("stable-diffusion", "float16", "fp16", sharded=True), source)
    for path in (source / "unet").glob("*.fp16*"):
        stem, number = path.name.split(".fp16")[0], path.name.split(".fp16")[1]
        if number.startswith("-"):
            path.rename(path.with_name(f"{stem}{number.replace('.', '.fp16.')}"))
        else:
            path.rename(path.with_name("diffusion_pytorch_model.safetensors.fp16.index.json"))
    index = source / "unet" / "diffusion_pytorch_model.safetensors.fp16.index.json"
    names = re.sub(r"\.fp16(-\d+-of-\d+)", r"\1.fp16", index.read_text())
    index.write_text(names)
    assert_loads_equal(source, "bf16", variant="fp16", **given)
    with Messages() as said:
        shmload.load_pipeline(source, dtype="bfloat16", variant="fp16", **given)
    assert any("deprecated format" in str(text) for text in said.texts)


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["path", "slash", "relative", "dotted", "relative-path"])
def test_source_is_named_as_the_library_would(saved, monkeypatch, spelling):
    source = saved("wan")
    monkeypatch.chdir(source.parent)
    given = {
        "path": source,
        "slash": f"{source}/",
        "relative": source.name,
        "dotted": f"./{source.name}",
        "relative-path": Path(source.name),
    }[spelling]
    got = shmload.load_pipeline(given, torch_dtype=torch.bfloat16)
    wanted = reference(given, torch.bfloat16)
    assert_equal(got, wanted)
    assert not mentions_of_view(got)


def test_hub_id_is_named_as_the_library_would(saved, hub_cache):
    hub_cache.add("tiny/wan", saved("wan"))
    got = shmload.load_pipeline("tiny/wan", torch_dtype=torch.bfloat16, cache_dir=hub_cache.root)
    wanted = from_pretrained(
        diffusers.WanPipeline, "tiny/wan", torch.bfloat16, cache_dir=hub_cache.root
    )
    assert_equal(got, wanted)
    assert not mentions_of_view(got)
