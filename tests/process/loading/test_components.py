"""Loading some components equals `from_pretrained` with the others passed as None."""

import pytest
import torch
from comparing import assert_equal, reference
from pipelines import FAMILIES

import shmload

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "text_encoder") for family in FAMILIES),
        *(("stable-diffusion", kind) for kind in ("vae", "transformer", "none")),
    ],
)
def test_pipeline_of_some_components_equals_the_library(saved, shm_names, family, kind):
    source = saved(family)
    models = [path.name for path in source.iterdir() if list(path.glob("*.safetensors*"))]
    wanted = {
        "vae": ["vae"],
        "text_encoder": [name for name in models if name.startswith("text_encoder")],
        "transformer": ["unet"],
        "none": [],
    }[kind]
    others = dict.fromkeys(name for name in models if name not in wanted)
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, components=wanted, share=True)
    assert {info.source.split("/")[-2] for info in shmload.segments()} == set(wanted)
    assert_equal(got, reference(source, torch.bfloat16, **others))
    assert all((getattr(got, name) is not None) == (name in wanted) for name in models)
    del got
    assert shm_names() == []
