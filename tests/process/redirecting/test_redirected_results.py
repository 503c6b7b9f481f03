"""What a redirected load gives can be used as what the library gives: trained, saved."""

import diffusers
import pytest
import torch
from comparing import assert_component_equal
from redirecting import assert_same

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_BF16 = torch.bfloat16


def both(load):
    """Load plainly and redirected; return both results."""
    torch.manual_seed(0)
    wanted = load()
    torch.manual_seed(0)
    with shmload.redirect():
        return load(), wanted


def load_unet(source):
    return diffusers.UNet2DConditionModel.from_pretrained(
        str(source), subfolder="unet", torch_dtype=_BF16
    )


@pytest.mark.parametrize(
    ("family", "dtype", "saving"),
    [
        ("stable-diffusion", _BF16, {"sharded": True}),
        ("stable-diffusion", torch.float16, {"dtype": "float16", "variant": "fp16"}),
        ("sdxl", torch.float16, {}),
        ("sdxl", None, {"dtype": "float16"}),
        ("sd3", _BF16, {}),
        ("sd3", None, {"dtype": "bfloat16"}),
        ("flux", _BF16, {"sharded": True}),
        ("flux", {"transformer": _BF16, "default": torch.float16}, {}),
        ("wan", _BF16, {}),
        ("qwen-image", _BF16, {}),
        ("qwen-image", None, {"dtype": "bfloat16"}),
    ],
)
def test_families(saved, ways, family, dtype, saving):
    source = str(saved(family, **saving))
    given = {name: saving[name] for name in ("variant",) if name in saving}
    if dtype is not None:
        given["torch_dtype"] = dtype
    assert_same(lambda: diffusers.DiffusionPipeline.from_pretrained(source, **given), ways)
    assert ways.taken == ["shmload"], ways.lines


def test_training_changes_this_process_only(saved):
    got, wanted = both(lambda: load_unet(saved("stable-diffusion")))
    for model in (got, wanted):
        torch.manual_seed(0)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sample = torch.randn(1, model.config.in_channels, 8, 8, dtype=_BF16)
        hidden = torch.randn(1, 4, model.config.cross_attention_dim, dtype=_BF16)
        model(sample, 1, hidden).sample.float().square().mean().backward()
        optimizer.step()
        model.eval()
    assert_component_equal(got, wanted, "unet")
    again, before = both(lambda: load_unet(saved("stable-diffusion")))
    assert_component_equal(again, before, "unet")
    assert not again.conv_in.weight.equal(got.conv_in.weight)
