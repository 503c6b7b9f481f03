"""Combined pipelines: the prior, which lies in another repository, is shared, too."""

import diffusers
import pytest
import torch
import transformers
from comparing import assert_equal
from redirecting import assert_same, ways  # noqa: F401 a fixture
from tokenizers_tiny import clip_tokenizer

import shmload
from shmload._building import mapped
from shmload._building.mapped import Spans
from shmload._host.descriptors import inode_of
from shmload._host.shm import SHM_DIR

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_BF16 = torch.bfloat16
_ENCODER = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    **{"num_hidden_layers": 2, "projection_dim": 32},
}
# A prior whose load draws random numbers is left to the library, which draws them later. Here it
# draws none that it keeps, but transformers 4 makes tables of weights that it then replaces.
_DRAWS = transformers.__version__.startswith("4.")
_PRIORS = ("prior_prior", "prior_image_encoder", "prior_text_encoder")


def _prior():
    tokenizer = clip_tokenizer()
    text = transformers.CLIPTextConfig(vocab_size=len(tokenizer), **_ENCODER)
    image = transformers.CLIPVisionConfig(image_size=16, patch_size=8, **_ENCODER)
    return diffusers.KandinskyV22PriorPipeline(
        prior=diffusers.PriorTransformer(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            embedding_dim=32,
            num_embeddings=77,
            additional_embeddings=4,
        ),
        image_encoder=transformers.CLIPVisionModelWithProjection(image),
        text_encoder=transformers.CLIPTextModelWithProjection(text),
        tokenizer=tokenizer,
        scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample"
        ),
        image_processor=transformers.CLIPImageProcessor(crop_size=16, size=16),
    )


def _decoder():
    return diffusers.KandinskyV22Pipeline(
        unet=diffusers.UNet2DConditionModel(
            sample_size=8,
            out_channels=8,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            cross_attention_dim=32,
            addition_embed_type="image",
            encoder_hid_dim=32,
            encoder_hid_dim_type="image_proj",
            resnet_time_scale_shift="scale_shift",
            norm_num_groups=8,
        ),
        scheduler=diffusers.DDPMScheduler(),
        movq=diffusers.VQModel(
            block_out_channels=[32, 64],
            down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
            up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
            latent_channels=4,
            norm_num_groups=8,
            norm_type="spatial",
            num_vq_embeddings=12,
            vq_embed_dim=4,
        ),
    )


def _write_card(folder, prior):
    (folder / "README.md").write_text(f"---\nlicense: mit\nprior:\n- {prior}\n---\nprior: none\n")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The directories of the decoder, whose card names the prior, and of the prior."""
    root = tmp_path_factory.mktemp("combined")
    torch.manual_seed(0)
    _prior().save_pretrained(root / "prior")
    _decoder().save_pretrained(root / "decoder")
    _write_card(root / "decoder", root / "prior")
    return root / "decoder", root / "prior"


@pytest.fixture
def decoder(folders):
    return folders[0]


@pytest.fixture
def said(caplog, monkeypatch):
    """A function that returns what was logged of private weights."""
    monkeypatch.setattr(mapped, "LEAST_NBYTES", 1)
    caplog.set_level("INFO", "shmload")
    return lambda: [line for line in caplog.messages if "lie in no segment" in line]


def assert_shared(pipe, names=_PRIORS):
    spans = Spans({inode_of((SHM_DIR / each.name).stat()) for each in shmload.segments()})
    for name in (*(() if _DRAWS else names), "unet", "movq"):
        assert all(spans.find(each) for each in getattr(pipe, name).parameters()), name


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (diffusers.AutoPipelineForText2Image, {}),
        (diffusers.AutoPipelineForImage2Image, {}),
        (diffusers.KandinskyV22CombinedPipeline, {}),
        (diffusers.DiffusionPipeline, {"load_connected_pipeline": True}),
        (None, {"load_connected_pipeline": True}),
    ],
    ids=str,
)
def test_prior_is_shared(decoder, cls, given, said):
    library = cls or diffusers.DiffusionPipeline
    wanted = library.from_pretrained(decoder, torch_dtype=_BF16, **given)
    assert "Combined" in type(wanted).__name__
    for _ in range(2):
        pipe = shmload.load_pipeline(decoder, pipeline_class=cls, dtype=_BF16, keep=True, **given)
        assert_equal(pipe, wanted)
        assert_shared(pipe)
    assert _DRAWS or said() == []


def test_decoder_alone_loads_no_prior(decoder):
    pipe = shmload.load_pipeline(decoder, dtype=_BF16, keep=True)
    assert type(pipe) is diffusers.KandinskyV22Pipeline
    assert not any("prior" in each.source for each in shmload.segments())


def test_components_of_the_prior_can_be_passed_in(decoder, folders):
    mine = diffusers.PriorTransformer.from_pretrained(folders[1] / "prior")
    pipe = shmload.load_pipeline(
        decoder,
        pipeline_class="KandinskyV22CombinedPipeline",
        dtype=_BF16,
        keep=True,
        prior_prior=mine,
    )
    assert pipe.prior_prior is mine
    assert_shared(pipe, _PRIORS[1:])


def test_dict_of_dtypes_leaves_the_prior_to_the_library(decoder, said):
    given = {"dtype": {"unet": _BF16, "default": torch.float16}}
    cls = diffusers.KandinskyV22CombinedPipeline
    pipe = shmload.load_pipeline(decoder, pipeline_class=cls, keep=True, **given)
    assert_equal(pipe, cls.from_pretrained(decoder, torch_dtype=given["dtype"]))
    [line] = said()
    assert all(f"{name} " in line for name in _PRIORS)
    assert line.count("(from another source)") == 3


def test_prior_on_devices(decoder):
    cls = diffusers.KandinskyV22CombinedPipeline
    wanted = cls.from_pretrained(decoder, torch_dtype=_BF16)
    pipe = shmload.load_pipeline(decoder, pipeline_class=cls, dtype=_BF16, device_map="cpu")
    for name in (*_PRIORS, "unet", "movq"):
        state = getattr(pipe, name).state_dict()
        for key, tensor in getattr(wanted, name).state_dict().items():
            assert torch.equal(state[key], tensor), (name, key)


def test_prior_that_is_not_there_is_the_librarys_error(decoder, tmp_path):
    for path in decoder.iterdir():
        if path.name != "README.md":
            (tmp_path / path.name).symlink_to(path)
    _write_card(tmp_path, tmp_path / "none")
    cls = diffusers.KandinskyV22CombinedPipeline
    with pytest.raises((OSError, ValueError)) as wanted:
        cls.from_pretrained(tmp_path)
    with pytest.raises(type(wanted.value)) as got:
        shmload.load_pipeline(tmp_path, pipeline_class=cls)
    assert str(got.value) == str(wanted.value)


def test_redirected(decoder, folders, hub_cache, tmp_path, ways):  # noqa: F811
    def load(source, **given):
        return diffusers.AutoPipelineForText2Image.from_pretrained(
            source, torch_dtype=_BF16, **given
        )

    # The library says of each of the two loads that `torch_dtype` is an old name.
    assert_same(lambda: load(decoder), ways, are_texts_same=False)
    for path in decoder.iterdir():
        if path.name != "README.md":
            (tmp_path / path.name).symlink_to(path)
    _write_card(tmp_path, "me/prior")
    given = {"cache_dir": hub_cache.root}
    assert_same(lambda: load(tmp_path, **given), ways, are_texts_same=False)
    hub_cache.add("me/prior", folders[1])
    assert_same(lambda: load(tmp_path, **given), ways, are_texts_same=False)
    assert ways.taken == ["shmload", "library", "shmload"], ways.lines
