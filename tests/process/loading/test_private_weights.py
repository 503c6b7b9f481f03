"""Weights lie in segments; the size of those that do not is logged."""

import diffusers
import pytest
import torch

import shmload
from shmload._building import build

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_BF16 = torch.bfloat16


class Copying(diffusers.StableDiffusionPipeline):
    """A pipeline that copies a model's weights when it is built, as some libraries do."""

    def __init__(
        self, vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor
    ):
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
        super().__init__(
            *(vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor)
        )


def test_size_of_copied_weights_is_logged(saved, caplog, monkeypatch):
    caplog.set_level("INFO", "shmload")
    source = saved("stable-diffusion")

    def said():
        shmload.load_pipeline(source, dtype=_BF16, pipeline_class=Copying)
        return [each for each in caplog.messages if "lie in no segment" in each]

    assert said() == []  # little
    monkeypatch.setattr(build, "_LEAST_NBYTES", 1 << 10)
    (line,) = said()
    assert line.startswith(f"{source}: ")
    assert "KiB lie in no segment" in line
