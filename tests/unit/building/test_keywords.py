"""Keywords that nothing takes are refused; what the library or the pipeline takes never is."""

import inspect
import json
import re

import diffusers
import pytest
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin

import shmload
from shmload._building.keywords import MODEL_KEYWORDS, PIPELINE_KEYWORDS, require_taken
from shmload._building.pipeline_maker import PipelineMaker
from shmload._checkpoints.source import Source

pytestmark = pytest.mark.libraries


@pytest.fixture
def make_source(tmp_path):
    """Return a function that makes a source which names a class and lists two components."""

    def make(class_name="StableDiffusionPipeline"):
        listed = {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "VAE"]}
        index = {"_class_name": class_name, "requires_safety_checker": True, **listed}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        return Source(
            given=tmp_path,
            root=tmp_path,
            class_name=class_name,
            components=tuple(listed),
            checkpoints=(),
        )

    return make


def require(kwargs, source, find_class=None):
    find_class = find_class or PipelineMaker(None).find_class
    require_taken(kwargs, source, shmload.load_pipeline, find_class)


def test_list_has_every_keyword_that_the_library_reads_or_documents():
    for function in (DiffusionPipeline.from_pretrained, DiffusionPipeline.download):
        text = inspect.getsource(function)
        read = set(re.findall(r"kwargs\.(?:pop|get)\(\"(\w+)\"", text))
        documented = set(re.findall(r"^ {12}(\w+) ?\(.*optional", text, re.MULTILINE))
        assert len(read) > 10
        missing = (read | documented) - PIPELINE_KEYWORDS - {"dtype", "torch_dtype", "kwargs"}
        assert {name for name in missing if not name.startswith("pretrained_model_name")} == set()


def test_list_has_every_keyword_that_models_of_diffusers_read():
    for function in (ModelMixin.from_pretrained, ConfigMixin.load_config):
        read = set(re.findall(r"kwargs\.pop\(\s*\"(\w+)\"", inspect.getsource(function)))
        assert len(read) > 8
        assert read - MODEL_KEYWORDS - {"dtype", "torch_dtype"} == set()


@pytest.mark.parametrize(
    ("name", "near"),
    [("torch_dtpye", "torch_dtype"), ("kept", "keep"), ("txt_encoder", "text_encoder")],
)
def test_typing_error_is_refused_with_the_nearest_name(make_source, name, near):
    with pytest.raises(shmload.UnknownArgument, match=f"{name!r}.*did you mean {near!r}") as caught:
        require({name: None}, make_source())
    assert "nor has StableDiffusionPipeline.from_pretrained" in str(caught.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"requires_safety_checker": False},  # in model_index.json
        {"image_encoder": None, "feature_extractor": None},  # only in the constructor
        {"use_safetensors": True, "proxies": None, "mirror": "m"},
        {"custom_pipeline": "mine", "of_my_pipeline": 1},
        {"load_connected_pipeline": True, "prior_prior": 1},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_what_something_takes_is_not_refused(make_source, kwargs):
    require(kwargs, make_source())


def test_class_that_loads_in_its_own_way_is_not_judged(make_source):
    class Mine(diffusers.StableDiffusionPipeline):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            raise NotImplementedError

    for find_class in (lambda _: Mine, lambda _: diffusers.AutoPipelineForText2Image):
        require({"enable_pag": 1}, make_source(), find_class)
    for class_name in ("", "NoSuchPipeline"):
        require({"of_my_pipeline": 1}, make_source(class_name))


def test_constructor_of_a_given_class_counts(make_source):
    class Mine(diffusers.StableDiffusionPipeline):
        def __init__(self, vae, unet, extra=None):
            super().__init__()

    require({"extra": 1}, make_source(), lambda _: Mine)
    with pytest.raises(shmload.UnknownArgument, match=r"Mine\.from_pretrained"):
        require({"scheduler": 1}, make_source(), lambda _: Mine)
