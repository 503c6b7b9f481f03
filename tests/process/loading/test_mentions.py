"""Messages and objects have the user's paths, never paths of a view."""

import diffusers
import pytest
import torch
from comparing import assert_equal, assert_loads_equal, from_pretrained
from traces import mentions_of_view

import shmload

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("spelling", ["{}/", "{}", "./{}"])
def test_source_is_named_as_the_library_would(saved, monkeypatch, spelling):
    source = saved("wan")
    monkeypatch.chdir(source.parent)
    assert_loads_equal(spelling.format(source.name), "bf16")


def test_hub_id_is_named_as_the_library_would(saved, hub_cache):
    hub_cache.add("tiny/wan", saved("wan"))
    got = shmload.load_pipeline("tiny/wan", torch_dtype=torch.bfloat16, cache_dir=hub_cache.root)
    wanted = from_pretrained(
        diffusers.WanPipeline, "tiny/wan", torch.bfloat16, cache_dir=hub_cache.root
    )
    assert_equal(got, wanted)
    assert not mentions_of_view(got)
