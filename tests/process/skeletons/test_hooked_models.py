"""Skeletons of models whose layers have hooks, and weights that hooks compute."""

import diffusers
import pytest
import torch
from comparing import assert_component_equal

import shmload
from shmload._building.draws import next_number

pytestmark = [pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"), pytest.mark.slow]


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    model = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=3,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
    model.save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


def numbers(model):
    return [n for module in model.modules() for n in module._forward_pre_hooks]


@pytest.mark.usefixtures("skeletons")
def test_hooks_get_the_numbers_that_a_build_would_take(source, built):
    kind = diffusers.AutoencoderOobleck
    shmload.load_model(kind, source, dtype="bfloat16")
    before = next_number()
    wanted = kind.from_pretrained(source, torch_dtype=torch.bfloat16)
    taken = next_number() - before
    got = shmload.load_model(kind, source, dtype="bfloat16")
    assert len(built) == 1
    assert taken > 0
    assert numbers(got) == [number + taken for number in numbers(wanted)]
    assert next_number() == before + 2 * taken
    assert_component_equal(got, wanted, "vae")
    latents = torch.ones(1, 3, 4, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(got.decode(latents).sample, wanted.decode(latents).sample)


@pytest.mark.usefixtures("skeletons")
def test_hook_of_a_program_replaces_none_of_the_librarys(source):
    kind = diffusers.AutoencoderOobleck
    for _ in range(2):
        model = shmload.load_model(kind, source, dtype="bfloat16")
    layer = next(m for m in model.modules() if m._forward_pre_hooks)
    own = list(layer._forward_pre_hooks.values())
    handle = layer.register_forward_pre_hook(print)
    assert list(layer._forward_pre_hooks.values()) == [*own, print]
    handle.remove()
    assert list(layer._forward_pre_hooks.values()) == own
