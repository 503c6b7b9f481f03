"""Loading some components equals `from_pretrained` with the others passed as None."""

import pytest
import torch
from comparing import assert_equal, reference
from pipelines import FAMILIES
from torch import nn

import shmload

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("kind", ["vae", "text_encoder", "transformer", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline_of_some_components_equals_the_library(saved, shm_names, family, kind):
    source = saved(family)
    whole = reference(source, torch.bfloat16)
    models = [name for name, part in whole.components.items() if isinstance(part, nn.Module)]
    main = "transformer" if "transformer" in models else "unet"
    wanted = {
        "vae": ["vae"],
        "text_encoder": [name for name in models if name.startswith("text_encoder")],
        "transformer": [main],
        "none": [],
    }[kind]
    others = dict.fromkeys(name for name in models if name not in wanted)
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, components=wanted, share=True)
    assert {info.source.split("/")[-2] for info in shmload.segments()} == set(wanted)
    assert_equal(got, reference(source, torch.bfloat16, **others))
    assert [name for name in models if getattr(got, name) is not None] == wanted
    del got
    assert shm_names() == []


def test_component_that_is_passed_in_is_used(saved):
    source = saved("stable-diffusion")
    text_encoder = reference(source, torch.bfloat16).text_encoder
    got = shmload.load_pipeline(
        source, torch_dtype=torch.bfloat16, components=["vae"], text_encoder=text_encoder
    )
    assert got.text_encoder is text_encoder
    assert got.unet is None
    assert got.vae is not None
