"""Modular pipelines: the library's own, over shared weights; a missing component is an error."""

import json
import shutil
from pathlib import Path
from types import MappingProxyType

import diffusers
import pytest
import torch
from comparing import assert_alike, assert_component_equal
from diffusers.utils import dynamic_modules_utils

import shmload
from shmload._checkpoints.source import MODULAR_INDEX
from shmload.errors import CheckpointError

_BF16 = torch.bfloat16
_PATH = "pretrained_model_name_or_path"
_IS_OLD = _PATH not in diffusers.ComponentSpec.loading_fields()
pytestmark = [
    pytest.mark.libraries,
    pytest.mark.usefixtures("evicts"),
    pytest.mark.skipif(_IS_OLD, reason="this diffusers has other modular pipelines"),
]


def load(source, dtype=None, names=None, own=None, **given):
    """Load by the library alone."""
    pipe = diffusers.ModularPipeline.from_pretrained(source, **(own or {}))
    pipe.load_components(names, **({} if dtype is None else {"dtype": dtype}), **given)
    return pipe


def assert_equal(got, wanted, folder):
    assert type(got) is type(wanted)
    assert repr(got.blocks) == repr(wanted.blocks)  # a repository's code is imported each time
    assert_alike(got.config, wanted.config, "config")
    assert list(got.components) == list(wanted.components)
    for name, part in wanted.components.items():
        mine = getattr(got, name)
        assert_component_equal(mine, part, name)
        assert getattr(mine, "_diffusers_load_id", "") == getattr(part, "_diffusers_load_id", "")
        assert vars(got.get_component_spec(name)) == vars(wanted.get_component_spec(name))
    for pipe, place in ((got, folder / "mine"), (wanted, folder / "theirs")):
        pipe.save_config(place)
    assert (folder / "mine" / MODULAR_INDEX).read_text() == (
        folder / "theirs" / MODULAR_INDEX
    ).read_text()


def respec(source, folder, **specs):
    """Write an index alone, whose specs point to a source but for the given fields; return it."""
    diffusers.ModularPipeline.from_pretrained(str(source)).save_config(folder)
    index = json.loads((folder / MODULAR_INDEX).read_text())
    for name, fields in specs.items():
        index[name][2] |= fields
    (folder / MODULAR_INDEX).write_text(json.dumps(index))
    return str(folder)


@pytest.fixture
def source(saved, tmp_path):
    """An index of SDXL, whose components lie in an ordinary repository."""
    return respec(saved("sdxl"), tmp_path / "source")


@pytest.fixture(scope="module")
def whole(saved, tmp_path_factory):
    """SDXL with its components, as `save_pretrained` writes it."""
    folder = str(tmp_path_factory.mktemp("modular") / "sdxl")
    load(str(saved("sdxl"))).save_pretrained(folder, overwrite_modular_index=True)
    return folder


# Equality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["index alone", "elsewhere", "a single file"])
@pytest.mark.parametrize("dtype", [None, {"unet": _BF16, "default": torch.float16}])
def test_is_what_the_library_loads(saved, tmp_path, case, dtype):
    plain, given = str(saved("sdxl")), {}
    specs = {"unet": {"type_hint": [None, None]}}
    if case == "elsewhere":
        fp16, other = str(saved("sdxl", variant="fp16")), str(saved("sdxl", "float16"))
        specs = {"unet": {_PATH: other}, "vae": {_PATH: fp16, "variant": "fp16"}}
    elif case == "a single file":
        specs = {"vae": {_PATH: f"{plain}/vae/diffusion_pytorch_model.safetensors"}}
        given = {"config": {"vae": plain}}
    source = respec(plain, tmp_path / "source", **specs)
    wanted = load(source, dtype, **given)
    asked = MappingProxyType(dtype) if isinstance(dtype, dict) else dtype
    got = shmload.load_pipeline(source, dtype=asked, keep=True, **given)
    assert_equal(got, wanted, tmp_path)


@pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks`")  # of the library alone
def test_hub_ids_and_revisions(saved, hub_cache, tmp_path):
    hub_cache.add("me/sdxl", saved("sdxl"), revision="b" * 40)
    parts = {name: {_PATH: "me/sdxl", "revision": "b" * 40} for name in ("unet", "tokenizer")}
    source = respec(saved("sdxl"), tmp_path / "source", **parts, vae={_PATH: "me/sdxl"})
    hub_cache.add("me/modular", Path(source))
    where = {"cache_dir": hub_cache.root}
    wanted = load("me/modular", _BF16, own=where, **where)
    got = shmload.load_pipeline("me/modular", dtype="bfloat16", keep=True, **where)
    assert_equal(got, wanted, tmp_path)
    assert shmload.warm("me/modular", dtype="bfloat16", **where).read_nbytes == 0


_OWN = """
import diffusers

class Mine(diffusers.ModularPipelineBlocks):
    model_name = "mine"
    description = "decodes"
    inputs = intermediate_outputs = []
    expected_components = [diffusers.ComponentSpec("vae", diffusers.AutoencoderKL)]
    def __call__(self, components, state):
        return components, state
"""


def test_blocks_of_the_repository_itself(whole, tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(modules)
    source = tmp_path / "source"
    shutil.copytree(Path(whole, "vae"), source / "vae")
    (source / "block.py").write_text(_OWN)
    code = {"_class_name": "Mine", "auto_map": {"ModularPipelineBlocks": "block.Mine"}}
    (source / "modular_config.json").write_text(json.dumps(code))
    vae = json.loads(Path(whole, MODULAR_INDEX).read_text())["vae"]
    index = {"_blocks_class_name": "Mine", "_class_name": "ModularPipeline", "vae": vae}
    (source / MODULAR_INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="trust_remote_code"):
        shmload.load_pipeline(str(source))
    got = shmload.load_pipeline(str(source), trust_remote_code=True)
    assert_equal(got, load(str(source), own={"trust_remote_code": True}), tmp_path)


# Arguments ----------------------------------------------------------------------------------------


def test_components_by_name_workflows_and_managers(source, tmp_path):
    only = shmload.load_pipeline(source, components=["vae"])
    assert only.vae is not None
    assert only.tokenizer is not None
    assert {"text_encoder", "text_encoder_2", "unet"} <= {*only.null_component_names}
    only.load_components("unet")
    assert_component_equal(only.unet, load(source).unet, "unet")

    manager = diffusers.ComponentsManager()
    first = shmload.load_pipeline(
        source, workflow="text2image", components_manager=manager, collection="one"
    )
    second = shmload.load_pipeline(
        source, components_manager=manager, collection="two", vae=first.vae, image_encoder=None
    )
    assert second.vae is first.vae
    assert_equal(first, load(source, own={"workflow": "text2image"}), tmp_path)
    assert len(manager.components) == len(set(map(id, manager.components.values())))

    placed = shmload.load_pipeline(source, device_map={"unet": "meta"}, max_memory={"cpu": "1GiB"})
    assert (placed.unet.device.type, placed.vae.device.type) == ("meta", "cpu")


@pytest.mark.parametrize(
    ("part", "fields", "cause"),
    [
        ("unet", {_PATH: "/no/such/place"}, "no such file"),
        ("unet", {"subfolder": "unte"}, "no (file named|subfolder)"),
        ("tokenizer", {_PATH: "/no/such/place"}, ""),
        ("unet", {_PATH: "https://example.com/model.safetensors"}, ""),
    ],
)
def test_component_that_is_missing_is_named(saved, tmp_path, part, fields, cause):
    source = respec(saved("sdxl"), tmp_path / "source", **{part: fields})
    where = fields.get(_PATH, str(saved("sdxl")))
    is_read = part == "unet" and "example" not in where
    for call in (shmload.load_pipeline, shmload.warm) if is_read else (shmload.load_pipeline,):
        with pytest.raises(CheckpointError, match=f"component {part} .*{where}.*{cause}") as caught:
            call(source, dtype="bfloat16")
        assert (caught.value.name, caught.value.source) == (part, where)
    assert not shmload.segments()
    if part == "unet":
        assert shmload.load_pipeline(source, components=["vae"]).vae is not None


def test_trust_is_for_the_repository_alone(saved, tmp_path):
    other = shutil.copytree(saved("sdxl") / "unet", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "m.Own"}}))
    (other / "m.py").write_text("open('ran', 'w')")
    spec = {"type_hint": [None, None], _PATH: str(other), "subfolder": ""}
    source = respec(saved("sdxl"), tmp_path / "source", unet=spec)
    with pytest.raises(CheckpointError, match=r"component unet .*trust_remote_code"):
        shmload.load_pipeline(source, trust_remote_code=True)
    assert not Path("ran").exists()


# Sharing ------------------------------------------------------------------------------------------


def test_whole_repository_is_shared_and_viewed(whole):
    with shmload.share(whole, dtype="bfloat16", components=["vae"]) as handle:
        assert handle.load().unet is None
    with shmload.view(whole, dtype="bfloat16") as path:
        assert load(str(path)).vae is not None
