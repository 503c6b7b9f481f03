"""LoRAs are fused once, and equal what diffusers fuses."""

import diffusers
import pytest
from accelerated import assert_as_on_the_host_but_for_notes
from adapters import save_lora
from comparing import assert_equal
from mappings import copied_nbytes
from pipelines import build

import shmload
from shmload._building import remembered

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.usefixtures("evicts"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Two files of LoRAs for the UNet."""
    folder = tmp_path_factory.mktemp("lora")
    return [
        save_lora(build("stable-diffusion").unet, folder / f"{target}.safetensors", target, number)
        for number, target in enumerate(("to_q", "to_v"))
    ]


def mixes():
    return [info.kept for info in shmload.segments() if info.kept]


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
    monkeypatch.setattr(remembered, "_MUCH_NBYTES", 1)
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pipeline of Wan with two transformers, and a LoRA for each of them."""
    folder = tmp_path_factory.mktemp("pair")
    pipe = build("wan")
    others = {name: part for name, part in pipe.components.items() if name != "transformer_2"}
    second = build("wan", seed=1).transformer
    pipe = diffusers.WanPipeline(**others, transformer_2=second, boundary_ratio=0.5)
    pipe.save_pretrained(folder / "pipeline")
    models = enumerate((pipe.transformer, second))
    files = [save_lora(model, folder / f"{n}.safetensors", seed=n) for n, model in models]
    return folder / "pipeline", files


def test_lora_says_which_of_two_transformers_it_is_for(pair):
    source, files = pair
    wanted = diffusers.WanPipeline.from_pretrained(source)
    for number, file in enumerate(files):
        wanted.load_lora_weights(
            str(file.parent),
            weight_name=file.name,
            adapter_name=f"lora_{number}",
            load_into_transformer_2=bool(number),
        )
    wanted.set_adapters(["lora_0", "lora_1"], [1.0, 0.5])
    wanted.fuse_lora(["transformer", "transformer_2"], adapter_names=["lora_0", "lora_1"])
    wanted.unload_lora_weights()
    low, high = files
    loras = [
        {"path": low, "load_into_transformer_2": False},
        {"path": high, "scale": 0.5, "load_into_transformer_2": True},
    ]
    for pipe in (shmload.mix(source, loras, progress=False) for _ in range(2)):
        assert_as_on_the_host_but_for_notes(pipe, wanted)


def test_loras_that_do_not_say_it_are_refused(pair):
    source, files = pair
    with pytest.raises(shmload.ArgumentError, match="two transformers"):
        shmload.mix(source, files, progress=False)


def test_changed_file_of_a_lora_makes_another_mix(saved, loras, tmp_path):
    file = tmp_path / "lora.safetensors"
    for each in loras:
        file.write_bytes(each.read_bytes())
        shmload.mix(saved("stable-diffusion"), [file], progress=False)
    assert len(mixes()) == 2


def test_wrong_arguments(saved, loras, tmp_path):
    vae = diffusers.AutoencoderKL.from_pretrained(saved("stable-diffusion") / "vae")
    with pytest.raises(shmload.ArgumentError, match="no objects"):
        shmload.mix(saved("stable-diffusion"), loras, vae=vae)
    with pytest.raises(shmload.ArgumentError, match="needs LoRAs"):
        shmload.mix(saved("stable-diffusion"), [])
    with pytest.raises(shmload.SourceNotFound, match="takes local paths"):
        shmload.mix(saved("stable-diffusion"), [tmp_path / "none.safetensors"])
