"""LoRAs are fused once, and equal what diffusers fuses."""

import diffusers
import pytest
import torch
from comparing import assert_equal
from mappings import copied_nbytes
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

import shmload

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.usefixtures("evicts"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]


@pytest.fixture(scope="module")
def loras(saved, tmp_path_factory):
    """Two files of LoRAs for the UNet."""
    files = []
    for number, target in enumerate(("to_q", "to_v")):
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(saved("stable-diffusion"))
        torch.manual_seed(number)
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
        folder = tmp_path_factory.mktemp("lora")
        layers = get_peft_model_state_dict(pipe.unet)
        diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)
        files.append(folder / "pytorch_lora_weights.safetensors")
    return files


def mixes():
    return [i.source for i in shmload.segments() if ".mixed-" in i.source]


def fused(source, files, *, scale):
    """Fuse by the library alone."""
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(source)
    names = [f"lora_{number}" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)
    if len(files) == 1:
        pipe.fuse_lora(lora_scale=scale)
    else:
        pipe.set_adapters(names, [scale] * len(files))
        pipe.fuse_lora(adapter_names=names)
    pipe.unload_lora_weights()
    return pipe


@pytest.mark.parametrize("count", [1, 2])
def test_mix_is_what_the_library_fuses_and_is_made_once(saved, loras, count, monkeypatch):
    source, files = saved("stable-diffusion"), loras[:count]
    wanted = fused(source, files, scale=0.7)
    runs = []
    fuse_lora = diffusers.StableDiffusionPipeline.fuse_lora
    monkeypatch.setattr(
        diffusers.StableDiffusionPipeline,
        "fuse_lora",
        lambda *args, **kwargs: runs.append(kwargs) or fuse_lora(*args, **kwargs),
    )
    for _ in range(3):
        pipe = shmload.mix(source, [(file, 0.7) for file in files], progress=False)
        for each in (pipe.unet, wanted.unet):
            each.eval()
        assert_equal(pipe, wanted)
        assert copied_nbytes(pipe) == 0
    assert len(runs) == len(mixes()) == 1


def test_other_scales_and_orders_are_other_mixes(saved, loras):
    source = saved("stable-diffusion")
    one, other = loras
    for wanted in ([one], [(one, 0.5)], [(one, 0.5), other], [other, (one, 0.5)]):
        shmload.mix(source, wanted, progress=False)
    assert len(mixes()) == 4


def test_changed_file_of_a_lora_makes_another_mix(saved, loras, tmp_path):
    file = tmp_path / "lora.safetensors"
    for each in loras:
        file.write_bytes(each.read_bytes())
        shmload.mix(saved("stable-diffusion"), [file], progress=False)
    assert len(mixes()) == 2


def test_styles_are_switched_without_an_effect_on_each_other(saved, loras):
    source = saved("stable-diffusion")
    wanted = [fused(source, [each], scale=1.0).unet.state_dict() for each in loras]
    for turn in range(6):
        unet = shmload.mix(source, [loras[turn % 2]], progress=False).unet
        state = unet.state_dict()
        assert all(torch.equal(state[k], each) for k, each in wanted[turn % 2].items())
        with torch.no_grad():
            unet.conv_in.weight.zero_()  # stays this pipeline's own


def test_first_mix_decodes_while_it_imports_the_libraries(saved, loras, new_child):
    child = new_child(
        """
import sys, shmload
from shmload._loading.load import Load
begin = Load.__init__
def say(*args, **kwargs):
    print("DECODES", *sorted({"torch", "diffusers"} & sys.modules.keys()), flush=True)
    begin(*args, **kwargs)
Load.__init__ = say
shmload.mix(sys.argv[1], [sys.argv[2]], progress=False)
print("MIXED", flush=True)
""",
        saved("stable-diffusion"),
        loras[0],
    )
    assert child.expect("DECODES") == ""
    child.expect("MIXED")
    assert len(mixes()) == 1


def test_wrong_arguments(saved, tmp_path):
    with pytest.raises(shmload.ArgumentError, match="needs LoRAs"):
        shmload.mix(saved("stable-diffusion"), [])
    with pytest.raises(shmload.SourceNotFound, match="takes local paths"):
        shmload.mix(saved("stable-diffusion"), [tmp_path / "none.safetensors"])
