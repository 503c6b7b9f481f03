"""What scripts/encode_dataset.py knows of a pipeline before anything is loaded."""

import json

import click
import pytest
from encode_dataset import choose_components

MODELS = {
    "_class_name": "P",
    "vae": ["diffusers", "AutoencoderKL"],
    "text_encoder": ["transformers", "B"],
    "text_encoder_2": ["transformers", "B"],
    "text_encoder_3": [None, None],
    "unet": ["diffusers", "B"],
}


def choose(folder, *given, size=64, **models):
    """Return the components for a pipeline whose VAE halves the sides three times."""
    (folder / "vae").mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(MODELS | models))
    (folder / "vae" / "config.json").write_text('{"block_out_channels": [1, 1, 1, 1]}')
    return choose_components(str(folder), given, size)


def refused(folder, *given, **more):
    with pytest.raises(click.UsageError) as caught:
        choose(folder, *given, **more)
    return str(caught.value)


def test_vae_and_text_encoders_are_loaded_by_default(tmp_path):
    assert choose(tmp_path) == ["vae", "text_encoder", "text_encoder_2"]
    assert choose(tmp_path, "vae") == ("vae",)
    assert choose(tmp_path, vae=["mine", "Vae"])[0] == "vae"


def test_source_without_an_index_is_left_to_shmload(tmp_path):
    assert choose_components(str(tmp_path), (), 20) == ["vae"]


def test_pipeline_for_videos_is_refused_before_it_is_loaded(tmp_path):
    said = refused(tmp_path, vae=["diffusers", "AutoencoderKLWan"])
    assert "is AutoencoderKLWan. This script needs an image pipeline, with AutoencoderKL" in said
    alone = "for captions alone give --component text_encoder --component text_encoder_2"
    assert said.endswith(alone)
    assert choose(tmp_path, "text_encoder", vae=["diffusers", "AutoencoderKLWan"], size=7)


def test_pipeline_without_a_vae_is_refused(tmp_path):
    assert "has no VAE" in refused(tmp_path, vae=[None, None])
    assert choose(tmp_path, "text_encoder", vae=[None, None]) == ("text_encoder",)
    assert "is none" in refused(tmp_path, "vae", vae=[None, None])


def test_components_that_encode_nothing_are_refused(tmp_path):
    assert "--component vae, --component text_encoder" in refused(tmp_path, "unet")


def test_size_that_would_be_rounded_is_refused(tmp_path):
    assert "--size 20 is no multiple of 8" in refused(tmp_path, size=20)
    assert "give 16 or 24" in refused(tmp_path, size=20)
    assert "give 8" in refused(tmp_path, size=3)
