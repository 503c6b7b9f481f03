"""Messages and objects have the user's paths, never paths of a view."""

from pathlib import Path

import diffusers
import pytest
import torch
from comparing import assert_equal, from_pretrained, reference
from traces import mentions_of_view

import shmload

pytestmark = pytest.mark.libraries


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
