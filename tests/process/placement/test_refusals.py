"""`plan`, `load_pipeline` and `to_device` accept and refuse the same; a refusal builds nothing."""

import functools

import pytest
import torch
import transformers
from accelerated import load
from torch import nn

import shmload

pytestmark = pytest.mark.libraries

# With transformers 5 a name that no file has.
_EMBEDDINGS = "embeddings" if transformers.__version__ >= "5" else "text_model.embeddings"
# Components of the tests' Flux, in the order of the pipeline: 71, 74, 186 and 85 KiB.
WRONG = [
    ({"device_map": {"": "gpu"}}, "did you mean 'cuda'"),
    ({"device_map": {"": 0, "vae": "disk"}}, "do not wait on a disk"),
    ({"device_map": {"": "cuda:7"}}, "names cuda:7, and the devices are cuda:0, cuda:1, cpu"),
    ({"device_map": {"": 0, "vea": 1}}, "no component 'vea'.*did you mean 'vae'"),
    ({"device_map": {"": 0, "tokenizer": 1}}, "no component 'tokenizer'; it has text_encoder"),
    ({"device_map": {"transformer": 0}}, "nothing of text_encoder, text_encoder_2, vae; a default"),
    (
        {"device_map": {"": 0, "transformer": {"transformer_block.0": 1}}},
        "transformer has no module 'transformer_block'.*did you mean 'transformer_blocks'",
    ),
    (
        {"device_map": {"": 0, "transformer.transformer_blocks.0.attn": 1}},
        r"transformer_blocks.0 must stay whole, but transformer.transformer_blocks.0.attn would",
    ),
    ({"device_map": {"": 0, "text_encoder_2.shared": 1}}, "share a tensor"),
    ({"device_map": {"": 0}, "max_memory": {0: "300KiB"}}, "exceed its 300.00 KiB"),
    (
        {"device_map": {"": 0}, "max_memory": {1: "1GiB"}},
        "names cuda:0, and the devices are cuda:1",
    ),
    ({"device_map": "balanced", "max_memory": {0: "100KiB", 1: "100KiB"}}, "finds no device for"),
    (
        {"device_map": "auto", "max_memory": {0: 9, 1: 9, "cpu": 9}},
        "'auto' finds no device for",
    ),
    ({"device_map": "auto", "max_memory": {7: "1GiB"}}, "max_memory: it names cuda:7, and"),
    ({"device_map": "auto", "max_memory": {0: "0x24GiB"}}, "max_memory: '0x24GiB' is not a size"),
]
RIGHT = [
    {"device_map": {"": 0, "vae.encoder": "cpu", "vae.decoder": "offload"}},
    {"device_map": "sequential", "max_memory": {0: "150KiB", 1: "300KiB"}},
    {"device_map": "auto", "max_memory": {0: "200KiB", 1: "200KiB", "cpu": "200KiB"}},
    {"device_map": {"": "meta", "vae": "cpu"}},
    {"device_map": {"": 0, "transformer": {"*_blocks.0": "cpu"}}, "max_memory": {0: "1GiB"}},
    {"device_map": {"": 0, f"text_encoder.{_EMBEDDINGS}": 1}},
]


def ids(case):
    return str(case[0] if isinstance(case, tuple) else case).replace("device_map", "map")


@pytest.mark.parametrize("case", WRONG, ids=ids)
def test_wrong_arguments_are_refused_by_both_and_leave_nothing(saved, accelerators, built, case):
    arguments, match = case
    with pytest.raises(shmload.ShmloadError, match=match) as planned:
        shmload.plan(saved("flux"), dtype="bfloat16", **arguments)
    with pytest.raises(shmload.ShmloadError, match=match) as loaded:
        load(saved("flux"), keep=True, **arguments)
    assert type(loaded.value) is type(planned.value)
    assert built == []
    assert shmload.segments() == []


@pytest.mark.parametrize("arguments", RIGHT, ids=ids)
def test_right_arguments_are_planned_as_they_are_done(saved, accelerators, arguments):
    planned = shmload.plan(saved("flux"), dtype="bfloat16", **arguments).placement
    pipe = load(saved("flux"), **arguments)
    found = pipe.hf_device_map
    if list(found) == [""]:
        found = dict.fromkeys(planned.components, found[""])
    wanted = {
        f"{name}.{path}".rstrip("."): device
        for name, where in planned.components.items()
        for path, device in ({"": where} if isinstance(where, str) else where).items()
    }
    assert found == wanted


class Model(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"device_map": {"": 7}}, "names cuda:7"),
        ({"device_map": {"first": 0}}, "nothing of second"),
        ({"device_map": {"": 0, "frist": 1}}, "the model has no module 'frist'.*mean 'first'"),
        ({"device_map": {"": 0, "second": "disk"}}, "do not wait on a disk"),
        ({"device_map": "auto", "max_memory": {7: "1GiB"}}, "max_memory: it names cuda:7"),
        ({"device_map": 0, "max_memory": {0: 9}}, "exceed its 9 B"),
    ],
)
def test_wrong_map_leaves_a_module_as_it_was(accelerators, arguments, match):
    model = Model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with pytest.raises(shmload.ShmloadError, match=match):
        shmload.to_device(model, **arguments)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_map": {"": 0, "vae": 7}},
        {"device_map": "auto", "max_memory": {7: "1GiB"}},
        {"device_map": "cuda", "max_host_memory": "much"},
        {"device_map": "cuda", "max_memory": "20GiB"},
        {"max_memory": {0: "1GiB"}},
    ],
    ids=str,
)
def test_what_no_source_can_mend_is_said_before_the_source_is_looked_for(accelerators, arguments):
    said = r"device_map|max_memory|max_host_memory"
    with pytest.raises(shmload.ArgumentError, match=said):
        shmload.load_pipeline("nobody/no-such-source", **arguments)
    with pytest.raises(shmload.ArgumentError, match=said):
        shmload.load_model("AutoencoderKL", "nobody/no-such-source", **arguments)


def test_model_by_itself_has_paths_of_its_own(saved, accelerators, built):
    load_vae = functools.partial(
        shmload.load_model, "AutoencoderKL", saved("flux"), subfolder="vae", dtype=torch.bfloat16
    )
    with pytest.raises(shmload.ArgumentError, match="nothing of decoder"):
        load_vae(device_map={"encoder": 0})
    assert built == []
    found = load_vae(device_map={"": 0, "decoder": 1})
    assert found.hf_device_map["decoder"] == "cuda:1"
