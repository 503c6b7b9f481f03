"""The libraries' loaders of adapters take a view, or a state dict, and give the same model."""

import diffusers
import peft
import pytest
import torch
import transformers
from adapters import ip_adapter_of, noise
from comparing import as_bytes
from mappings import Mappings, state_of
from safetensors import safe_open
from safetensors.torch import save_file

import shmload

pytestmark = pytest.mark.libraries


def new_pipeline(source, dtype=torch.float32):
    return diffusers.StableDiffusionPipeline.from_pretrained(
        source, safety_checker=None, torch_dtype=dtype
    )


def bytes_of(tensors):
    return {key: (each.dtype, each.shape, as_bytes(each)) for key, each in tensors.items()}


def save_both(tensors, folder, stem):
    """Save a state dict as safetensors and as a file of PyTorch, each in a folder of its own."""
    for suffix, save in ((".safetensors", save_file), (".bin", torch.save)):
        path = folder / suffix[1:] / f"{stem}{suffix}"
        path.parent.mkdir(parents=True)
        save(tensors, path)


# LoRA ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loras(saved, tmp_path_factory):
    """Folders of one LoRA: `diffusers/bin`, `kohya/safetensors` and so on."""
    folder = tmp_path_factory.mktemp("loras")
    pipe = new_pipeline(saved("stable-diffusion"))
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipe.unet.add_adapter(config)
    state = peft.get_peft_model_state_dict(pipe.unet)
    of_diffusers = {f"unet.{key}": noise(*tensor.shape) for key, tensor in state.items()}
    save_both(of_diffusers, folder / "diffusers", "pytorch_lora_weights")
    save_both(dict(as_kohya(of_diffusers)), folder / "kohya", "my.lora.v1")
    return folder


def as_kohya(tensors):
    for key, tensor in tensors.items():
        path, kind = key.removeprefix("unet.").split(".lora_")
        base = f"lora_unet_{path.replace('.', '_')}"
        yield f"{base}.lora_{'down' if kind[0] == 'A' else 'up'}.weight", tensor
        yield f"{base}.alpha", torch.tensor(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["diffusers/safetensors", "diffusers/bin", "kohya/safetensors"])
def test_lora_is_that_of_the_library(saved, loras, name, dtype, caplog):
    source, folder = saved("stable-diffusion"), loras / name
    (file,) = folder.iterdir()
    wanted = new_pipeline(source, dtype)
    # Without the name, diffusers 0.35 refuses a file where the hub is off.
    wanted.load_lora_weights(str(file), weight_name=file.name)
    for given in (folder, file):
        got = new_pipeline(source, dtype)
        with shmload.view(given, dtype=dtype) as path:
            got.load_lora_weights(path, weight_name=file.with_suffix(".safetensors").name)
        assert bytes_of(state_of(got)) == bytes_of(state_of(wanted))
        configs = [pipe.unet.peft_config["default_0"].to_dict() for pipe in (got, wanted)]
        assert configs[0] == configs[1]
        assert "/dev/shm" not in str(configs)
        if name.startswith("diffusers") and dtype == torch.bfloat16:
            adapter = [each for key, each in state_of(got).items() if "lora" in key]
            assert all("/shmload-" in Mappings().find(each)[1] for each in adapter)
    got = new_pipeline(source, dtype)
    got.load_lora_weights(shmload.load_state_dict(folder))
    assert bytes_of(state_of(got)) == bytes_of(state_of(wanted))
    assert "left to the library" not in caplog.text


def test_scale_in_the_metadata_counts(saved, tmp_path, caplog, evicts):
    """A scale that no tensor tells: diffusers keeps it in the file's metadata."""
    source = saved("stable-diffusion")
    pipe = new_pipeline(source)
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False
    )
    pipe.unet.add_adapter(config)
    state = peft.get_peft_model_state_dict(pipe.unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path, unet_lora_layers=state, unet_lora_adapter_metadata=config.to_dict()
    )
    name = "pytorch_lora_weights.safetensors"
    with safe_open(tmp_path / name, "pt") as file:
        metadata = file.metadata()
    if "lora_adapter_metadata" not in metadata:
        pytest.skip("this diffusers keeps no metadata")
    wanted = new_pipeline(source)
    wanted.load_lora_weights(str(tmp_path), weight_name=name)
    got = new_pipeline(source)
    with shmload.view(tmp_path, dtype="bfloat16") as path:
        got.load_lora_weights(path, weight_name=name)
    scalings = [scalings_of(each.unet) for each in (got, wanted)]
    assert scalings[0] == scalings[1] == {4.0}
    tensors = shmload.load_state_dict(tmp_path, keep=True)
    assert tensors.metadata == metadata
    assert "its metadata scales it" in caplog.text


def scalings_of(model):
    layers = (each for each in model.modules() if hasattr(each, "scaling"))
    return {scale for layer in layers for scale in layer.scaling.values()}


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_adapter_of_peft_is_that_of_the_library(saved, tmp_path):
    def base():
        return transformers.CLIPTextModel.from_pretrained(
            saved("stable-diffusion"), subfolder="text_encoder"
        )

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(base(), config).save_pretrained(tmp_path)
    wanted = peft.PeftModel.from_pretrained(base(), str(tmp_path))
    with shmload.view(tmp_path) as path:
        assert (path / "adapter_model.safetensors").is_symlink()
        got = peft.PeftModel.from_pretrained(base(), str(path))
    assert got.peft_config["default"].to_dict() == wanted.peft_config["default"].to_dict()
    assert bytes_of(got.state_dict()) == bytes_of(wanted.state_dict())


# Others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learned_embeds.bin", "learned_embeds.safetensors"])
def test_textual_inversion_is_that_of_the_library(saved, tmp_path, name):
    source, path = saved("stable-diffusion"), tmp_path / name
    (save_file if name.endswith(".safetensors") else torch.save)({"<cat>": noise(1, 32)}, path)

    def inverted(given):
        pipe = new_pipeline(source)
        torch.manual_seed(0)  # for the rows of the table that are new
        pipe.load_textual_inversion(given)
        return bytes_of(state_of(pipe)), pipe.tokenizer.get_vocab()

    wanted = inverted(str(path))
    for lent in (shmload.view(path), shmload.view(tmp_path)):
        with lent as given:
            assert inverted(str(given)) == wanted
    assert inverted(shmload.load_state_dict(tmp_path)) == wanted


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_ip_adapter_is_that_of_the_library(saved, tmp_path, suffix):
    source, models = saved("stable-diffusion"), tmp_path / "models"
    models.mkdir()
    wanted, got = new_pipeline(source), new_pipeline(source)
    parts = ip_adapter_of(wanted.unet)
    flat = {f"{name}.{key}": each for name, part in parts.items() for key, each in part.items()}
    weight_name = f"ip-adapter_sd15{suffix}"
    if suffix == ".bin":
        torch.save(parts, models / weight_name)
    else:
        save_file(flat, models / weight_name)
    given = {"subfolder": "models", "weight_name": weight_name}
    wanted.load_ip_adapter(str(tmp_path), image_encoder_folder=None, **given)
    name = "ip-adapter_sd15.safetensors"
    with shmload.view(tmp_path, **given) as path:
        got.load_ip_adapter(str(path), subfolder="", weight_name=name, image_encoder_folder=None)
    assert bytes_of(state_of(got)) == bytes_of(state_of(wanted))
    found = shmload.load_state_dict(models, weight_name=weight_name)
    assert bytes_of(found) == bytes_of(flat)
