"""`pipeline_class=`: what the class itself gives for `from_pretrained` is what a load gives."""

import diffusers
import pytest
import torch
from comparing import assert_equal, from_pretrained
from traces import Messages, mentions_of_view, naming

import shmload
from shmload._loading.load import Load
from shmload._placement.placement import place
from shmload.errors import ArgumentError

pytestmark = pytest.mark.libraries


class Mine(diffusers.DiffusionPipeline):
    """A user's own class, which takes fewer components than the source has."""

    def __init__(self, vae, text_encoder, tokenizer, unet, scheduler):
        super().__init__()
        self.register_modules(
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=scheduler,
        )


class Subclass(diffusers.StableDiffusionPipeline):
    """A subclass that takes fewer components than its base: its `components` raises an error."""

    def __init__(self, vae, text_encoder, tokenizer, unet, scheduler):
        parts = (vae, text_encoder, tokenizer, unet, scheduler)
        super().__init__(*parts, None, None, requires_safety_checker=False)


def assert_loads_by_class(pipeline_class, source, given=None, **kwargs):
    torch.manual_seed(0)
    with Messages() as said:
        got = shmload.load_pipeline(
            source, pipeline_class=given or pipeline_class, dtype="bfloat16", **kwargs
        )
    torch.manual_seed(0)
    with Messages() as wanted_said:
        wanted = from_pretrained(pipeline_class, source, torch.bfloat16, **kwargs)
    assert_equal(got, wanted)
    assert naming(source, said.texts) == wanted_said.texts
    assert not mentions_of_view(got)
    return got


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("stable-diffusion", "StableDiffusionImg2ImgPipeline"),
        ("stable-diffusion", "DiffusionPipeline"),
        ("stable-diffusion", "AutoPipelineForText2Image"),
        ("sdxl", "AutoPipelineForImage2Image"),
        ("flux", "AutoPipelineForInpainting"),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_class_of_diffusers_is_the_one_that_loads(saved, family, name, is_named):
    pipeline_class = getattr(diffusers, name)
    assert_loads_by_class(pipeline_class, saved(family), name if is_named else None)


def test_subclass_of_a_user_is_the_one_that_loads(saved, evicts):
    source = saved("stable-diffusion")
    got = assert_loads_by_class(Mine, source)
    assert type(got) is Mine
    kept = shmload.load_pipeline(source, pipeline_class=Mine, dtype="bfloat16", keep=True)
    # The class takes no safety checker: it is not decoded.
    assert len(shmload.segments()) == 3
    assert_equal(kept, got)


@pytest.fixture
def begun(monkeypatch):
    """The components that each load began to decode."""
    found = []

    def begin(source, *args, **kwargs):
        found.append({checkpoint.component for checkpoint in source.checkpoints})
        return Load(source, *args, **kwargs)

    monkeypatch.setattr("shmload._building.attempt.Load", begin)
    return found


@pytest.mark.parametrize("name", [Mine, f"{Mine.__module__}.{Mine.__qualname__}"])
def test_component_that_a_class_does_not_take_is_not_loaded(saved, begun, name):
    shmload.load_pipeline(saved("stable-diffusion"), pipeline_class=name)
    assert begun[-1] == {"unet", "vae", "text_encoder"}
    # What a class takes is known before the decode only if the class itself is given.
    assert len(begun) == 1 + (name is not Mine)


def test_strategy_with_a_limit_places_what_the_class_takes(saved, accelerators, monkeypatch):
    placed = []

    def place_noted(components, *args):
        placed.append({component.name for component in components})
        return place(components, *args)

    monkeypatch.setattr("shmload._building.route.place", place_noted)
    got = shmload.load_pipeline(
        saved("stable-diffusion"),
        pipeline_class=f"{Mine.__module__}.{Mine.__qualname__}",
        device_map="balanced",
        max_host_memory="1MiB",
    )
    assert placed == [{"unet", "vae", "text_encoder"}]
    assert set(got.hf_device_map) <= {"", *placed[0]}


def test_subclass_that_takes_less_than_its_base_loads(saved, accelerators):
    source = saved("stable-diffusion")
    got = shmload.load_pipeline(source, pipeline_class=Subclass, device_map="cuda:0")
    assert type(got) is Subclass
    assert got.hf_device_map == {"": "cuda:0"}


def test_component_left_out_that_the_class_does_not_take_is_no_warning(saved):
    source = saved("stable-diffusion")
    with Messages() as said:
        got = shmload.load_pipeline(
            source, pipeline_class=Mine, dtype="bfloat16", components=["vae"]
        )
    assert got.unet is None
    assert not [text for text in said.texts if "not expected" in str(text)]


def test_class_whose_packages_are_missing_names_them(saved, monkeypatch, evicts):
    name = "OnnxStableDiffusionPipeline"
    dummies = diffusers.utils.dummy_torch_and_transformers_and_onnx_objects
    monkeypatch.setattr(diffusers, name, getattr(dummies, name), raising=False)
    for given in (name, getattr(dummies, name)):
        with pytest.raises(ImportError, match="onnxruntime"):
            shmload.load_pipeline(saved("stable-diffusion"), pipeline_class=given, keep=True)
    assert not shmload.segments()


def test_name_with_a_module_is_a_class_too(saved):
    name = f"{Mine.__module__}.{Mine.__qualname__}"
    got = shmload.load_pipeline(saved("stable-diffusion"), pipeline_class=name)
    assert type(got) is Mine


def test_passed_component_belongs_to_the_class(saved, evicts):
    source = saved("stable-diffusion")
    unet = diffusers.UNet2DConditionModel.from_pretrained(source / "unet")
    got = shmload.load_pipeline(
        source,
        pipeline_class="StableDiffusionInpaintPipeline",
        dtype="bfloat16",
        unet=unet,
        safety_checker=None,
        keep=True,
    )
    assert type(got) is diffusers.StableDiffusionInpaintPipeline
    assert got.unet is unet
    assert len(shmload.segments()) == 2


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("StableDiffusionImg2ImgPipelin", "did you mean 'StableDiffusionImg2ImgPipeline'"),
        ("no_such_module.Mine", "no_such_module cannot be imported"),
        (diffusers.UNet2DConditionModel, "use load_model"),
        ("UNet2DConditionModel", "use load_model"),
        (3, "no class with a `from_pretrained`"),
    ],
)
def test_what_is_no_class_of_pipelines_is_refused(saved, evicts, given, text):
    with pytest.raises(ArgumentError, match=text):
        shmload.load_pipeline(saved("stable-diffusion"), pipeline_class=given, keep=True)
    assert not shmload.segments()


def test_ring_brings_the_class_too(saved, accelerators, streams):
    got = shmload.load_pipeline(
        saved("stable-diffusion"),
        pipeline_class=Mine,
        dtype="bfloat16",
        device_map="cuda:0",
        max_host_memory="1MiB",
    )
    assert type(got) is Mine
    assert got.unet.hf_device_map == {"": "cuda:0"}
    assert streams


def test_handle_brings_the_class(saved, evicts):
    source = str(saved("stable-diffusion"))
    with shmload.share(
        source, dtype="bfloat16", pipeline_class=diffusers.StableDiffusionImg2ImgPipeline
    ) as handle:
        same = shmload.Handle.from_text(handle.text)
        assert same == handle
        got = same.load()
        wanted = from_pretrained(diffusers.StableDiffusionImg2ImgPipeline, source, torch.bfloat16)
        assert_equal(got, wanted)
        other = shmload.Handle.of(source, dtype="bfloat16")
        assert other != handle
        assert "pipeline_class" not in other.facts
        assert handle.facts["pipeline_class"] == '"StableDiffusionImg2ImgPipeline"'


def test_handle_of_a_class_that_nobody_else_can_import_is_refused(saved):
    class Local(diffusers.StableDiffusionPipeline):
        pass

    with pytest.raises(ArgumentError, match="put the class into a module"):
        shmload.Handle.of(saved("stable-diffusion"), pipeline_class=Local)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("StableDiffusionImg2ImgPipelin", "did you mean 'StableDiffusionImg2ImgPipeline'"),
        ("UNet2DConditionModel", "use load_model"),
    ],
)
def test_name_of_no_pipeline_is_refused_by_share_at_once(saved, evicts, given, text):
    source = saved("stable-diffusion")
    for make in (shmload.share, shmload.Handle.of):
        with pytest.raises(ArgumentError, match=text):
            make(source, pipeline_class=given)
    assert not shmload.segments()


def test_share_decodes_what_the_class_takes(saved, evicts):
    name = "StableDiffusionLatentUpscalePipeline"
    source = saved("stable-diffusion")
    with shmload.share(source, dtype="bfloat16", pipeline_class=name) as handle:
        assert len(shmload.segments()) == 3
        got = shmload.Handle.from_text(handle.text).load()
        assert type(got).__name__ == name


def test_warm_and_plan_know_what_the_class_takes(saved, evicts):
    source = saved("stable-diffusion")
    name = "StableDiffusionLatentUpscalePipeline"
    planned = shmload.plan(source, dtype="bfloat16", pipeline_class=name, keep=True)
    taken = {"unet", "vae", "text_encoder"}
    assert {shard.component for shard in planned.shards} == taken
    report = shmload.warm(source, dtype="bfloat16", pipeline_class=name)
    assert len(report.segments) == 3
    shmload.load_pipeline(source, dtype="bfloat16", pipeline_class=name, keep=True)
    assert len(shmload.segments()) == 3
    with pytest.raises(ArgumentError, match="did you mean"):
        shmload.warm(source, pipeline_class=f"{name}s")
    with pytest.raises(ArgumentError, match="is for pipelines"):
        shmload.plan(source / "unet", pipeline_class=name)
