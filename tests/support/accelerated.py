"""Helpers that load pipelines onto accelerators and compare them with pipelines on the host."""

import torch
from comparing import assert_equal
from torch import nn

import shmload


def load(source, torch_dtype=torch.bfloat16, device_map="cuda", **kwargs):
    return shmload.load_pipeline(source, torch_dtype=torch_dtype, device_map=device_map, **kwargs)


def models_of(pipe):
    return {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}


def assert_as_on_the_host(got, wanted):
    """Compare two pipelines, except for their records of the modules' devices."""
    for model in models_of(got).values():
        del model.hf_device_map
    got.hf_device_map = None
    assert_equal(got, wanted)


def assert_as_on_the_host_but_for_notes(got, wanted):
    for name, model in models_of(wanted).items():
        found = models_of(got)[name].state_dict()
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def call_flux(model):
    """Call a Flux transformer with the same inputs each time."""
    config, generator = model.config, torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).to(model.dtype)

    with torch.no_grad():
        return model(
            hidden_states=drawn(1, 16, config.in_channels),
            encoder_hidden_states=drawn(1, 5, config.joint_attention_dim),
            pooled_projections=drawn(1, config.pooled_projection_dim),
            timestep=torch.ones(1),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(5, 3),
            guidance=torch.ones(1) if config.guidance_embeds else None,
            return_dict=False,
        )[0]
