"""A source resolves to the files that the libraries would load, or is refused."""

import json

import pytest

from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.wanted import Wanted
from shmload.errors import (
    IndexMalformed,
    ShardMissing,
)

PIPELINE = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.35.2",
    "requires_safety_checker": True,
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
MODELS = {
    "text_encoder/model.safetensors": b"",
    "text_encoder/config.json": {"architectures": ["CLIPTextModel"], "d": 1},
    "unet/diffusion_pytorch_model.safetensors": b"",
    "unet/config.json": {"_class_name": "UNet2DConditionModel"},
    "vae/diffusion_pytorch_model.safetensors": b"",
    "vae/config.json": {"_class_name": "AutoencoderKL"},
    "scheduler/scheduler_config.json": {},
    "tokenizer/vocab.json": {},
}


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return root


@pytest.fixture
def pipeline(tmp_path):
    return write(tmp_path / "pipeline", {"model_index.json": PIPELINE, **MODELS})


def found(root, passed=()):
    """Return the resolved source as {component: [names of shards]}."""
    source = resolve(Wanted(source=root), root, dict.fromkeys(passed))
    return {c.component: [path.name for path in c.shards] for c in source.checkpoints}


def index_of(*names):
    return {"weight_map": {f"tensor{number}": name for number, name in enumerate(names)}}


def test_component_passed_in_may_be_broken(pipeline):
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text("{")
    assert "unet" not in found(pipeline, passed=["unet"])
    with pytest.raises(IndexMalformed):
        found(pipeline)


def test_pipeline_class_in_the_repositorys_own_code_is_left_to_the_library(pipeline):
    write(pipeline, {"model_index.json": PIPELINE | {"_class_name": ["pipeline", "MyPipeline"]}})
    assert resolve(Wanted(source=pipeline), pipeline).class_name == ""


# Weight files -------------------------------------------------------------------------------------

_D, _T = "diffusion_pytorch_model", "model"
_LORA = ["pytorch_lora_weights.safetensors"]
_PEFT = ["adapter_model.safetensors"]
_EMBEDS = ["learned_embeds.safetensors"]


@pytest.mark.parametrize(
    ("files", "variant", "wanted"),
    [
        ({f"{_D}.safetensors": b""}, None, [f"{_D}.safetensors"]),
        # A component without the variant falls back to its plain files.
        ({f"{_D}.safetensors": b""}, "fp16", [f"{_D}.safetensors"]),
        ({f"{_D}.safetensors": b"", f"{_D}.fp16.safetensors": b""}, None, [f"{_D}.safetensors"]),
        (
            {f"{_D}.safetensors": b"", f"{_D}.fp16.safetensors": b""},
            "fp16",
            [f"{_D}.fp16.safetensors"],
        ),
        ({f"{_D}.non_ema.safetensors": b"", f"{_D}.safetensors": b""}, None, [f"{_D}.safetensors"]),
        # diffusers prefers an index, transformers the single file.
        (
            {
                f"{_D}.safetensors": b"",
                f"{_D}.safetensors.index.json": index_of("a.safetensors"),
                "a.safetensors": b"",
            },
            None,
            ["a.safetensors"],
        ),
        (
            {
                f"{_T}.safetensors": b"",
                f"{_T}.safetensors.index.json": index_of("a.safetensors"),
                "a.safetensors": b"",
            },
            None,
            [f"{_T}.safetensors"],
        ),
        (
            {
                f"{_T}.safetensors.index.json": index_of("b.safetensors", "a.safetensors"),
                "a.safetensors": b"",
                "b.safetensors": b"",
                "c.safetensors": b"",
            },
            None,
            ["a.safetensors", "b.safetensors"],
        ),
        # Only the variant is there: it must be asked for.
        ({f"{_D}.fp16.safetensors": b""}, "fp16", [f"{_D}.fp16.safetensors"]),
        ({f"{_D}.fp16.safetensors": b""}, None, None),
        ({f"{_D}.fp16.safetensors": b""}, "bf16", None),
        # No safetensors files: the library loads this component.
        ({f"{_D}.bin": b""}, None, None),
        ({"pytorch_model.bin": b""}, None, None),
        # Adapters, by the names that the libraries give them, or alone.
        ({"pytorch_lora_weights.safetensors": b"", "other.safetensors": b""}, None, _LORA),
        ({"adapter_model.safetensors": b"", "adapter_config.json": {}}, None, _PEFT),
        ({"learned_embeds.safetensors": b"", "README.md": b""}, None, _EMBEDS),
        ({"ip-adapter_sd15.safetensors": b""}, None, ["ip-adapter_sd15.safetensors"]),
        ({"lora.safetensors": b"", f"{_D}.fp16.safetensors": b""}, None, None),
        ({f"{_D}.safetensors": b"", "lora.safetensors": b""}, None, [f"{_D}.safetensors"]),
    ],
)
def test_weight_files_are_those_the_libraries_choose(tmp_path, files, variant, wanted):
    source = resolve(Wanted(source=tmp_path, variant=variant), write(tmp_path, files))
    assert [[path.name for path in each.shards] for each in source.checkpoints] == (
        [wanted] if wanted else []
    )
    assert source.unread == (() if wanted else ("",))


@pytest.mark.parametrize(
    ("config", "library", "class_name"),
    [
        ({"_class_name": "AutoencoderKL"}, "diffusers", "AutoencoderKL"),
        ({"architectures": ["CLIPTextModel"]}, "transformers", "CLIPTextModel"),
        ({"architectures": []}, "", ""),
        ({"architectures": None}, "", ""),
        ({}, "", ""),
    ],
)
def test_component_alone_says_its_class(tmp_path, config, library, class_name):
    write(tmp_path, {"config.json": config, f"{_T}.safetensors": b""})
    (checkpoint,) = resolve(Wanted(source=tmp_path), tmp_path).checkpoints
    assert (checkpoint.library, checkpoint.class_name) == (library, class_name)


def test_model_without_its_weights_is_missing_them(pipeline):
    (pipeline / "unet" / f"{_D}.safetensors").unlink()
    with pytest.raises(ShardMissing, match=rf"{_D}\.safetensors"):
        found(pipeline)
