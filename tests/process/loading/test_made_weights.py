"""With `keep=True`, weights that the library makes of the files' are one copy for all processes."""

import gc
import json
import shutil
import types

import pytest
import torch
from comparing import assert_equal, assert_modules_equal
from diffusers import StableDiffusionXLPipeline
from diffusers.loaders import single_file_utils
from mappings import copied_nbytes_of
from safetensors.torch import load_file, save_file

import shmload
from shmload._building import made, mapped
from shmload._building.homecoming import homes_of
from shmload._building.mapped import map_ranges
from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.wanted import Wanted
from shmload._segments.listing import names_by_inode
from shmload.errors import CapacityError

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_PROJECTION = "conditioner.embedders.1.model.text_projection"


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch):
    monkeypatch.setattr(mapped, "LEAST_NBYTES", 10_000)


@pytest.fixture
def load(one_file):
    """Load SDXL from one file, in which projections of its second encoder are joined."""

    def load_file(**given):
        config, path = one_file("sdxl")
        return shmload.load_pipeline(path, config=config, **{"keep": True} | given)

    return load_file


@pytest.fixture
def mixture(tmp_path):
    """A saved mixture, whose experts transformers 5 joins."""
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    models = transformers.AutoModelForCausalLM
    return types.SimpleNamespace(path=tmp_path / "mixture", AutoModelForCausalLM=models)


def made_segments():
    return [info for info in shmload.segments() if info.conversion.startswith("made/")]


def outside(model):
    """Return how many bytes of a model's weights lie in no segment, or are copies."""
    spans = mapped.Spans(set(names_by_inode()))
    weights = [each for each in model.state_dict().values() if each.numel()]
    inside = [each for each in weights if spans.find(each)]
    return (
        sum(each.nbytes for each in weights)
        - sum(each.nbytes for each in inside)
        + (copied_nbytes_of(inside))
    )


def test_later_loads_have_the_bytes_of_the_first(load, one_file):
    config, path = one_file("sdxl")
    wanted = StableDiffusionXLPipeline.from_single_file(str(path), config=config)
    for _ in range(2):
        pipe = load()
        assert_equal(pipe, wanted)
        assert outside(pipe.text_encoder_2) == 0
    [info] = made_segments()
    assert info.source == str(path)
    assert not info.is_pinned
    # Weights that are as in the file lie in its segment.
    assert info.nbytes < sum(each.nbytes for each in pipe.text_encoder_2.parameters())


@pytest.mark.slow
def test_another_process_has_them_too(load, one_file, new_child):
    load()
    child = new_child(
        """
import sys
import shmload
from shmload._building import mapped
mapped.LEAST_NBYTES = 10_000
pipe = shmload.load_pipeline(sys.argv[1], config=sys.argv[2], keep=True, progress=False)
from shmload._segments.listing import names_by_inode
spans = mapped.Spans(set(names_by_inode()))
print("OUTSIDE", sum(p.nbytes for p in pipe.text_encoder_2.parameters() if not spans.find(p)))
""",
        *one_file("sdxl")[::-1],
    )
    assert child.expect("OUTSIDE") == "0"
    assert len(made_segments()) == 1


def test_experts_that_the_library_joins_are_shared(mixture):
    wanted = mixture.AutoModelForCausalLM.from_pretrained(mixture.path)
    for _ in range(2):
        model = shmload.load_model("AutoModelForCausalLM", mixture.path, keep=True)
        assert_modules_equal(model, wanted, "model")
        assert outside(model) == 0
    assert len(made_segments()) == 1


def test_they_come_home_and_are_published_without_a_copy(load):
    pipe = load()
    weight = pipe.text_encoder_2.text_projection.weight
    assert homes_of(pipe.text_encoder_2).find(weight)
    nbytes = sum(each.nbytes for each in pipe.text_encoder_2.parameters())
    published = shmload.publish(pipe, "made")
    assert set(published.needs) >= {info.name for info in made_segments()}
    assert published.shared_nbytes > nbytes


# What is not shared -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "others", [{"keep": False}, {"keep": "converted"}, {"device_map": "cpu"}], ids=str
)
def test_what_does_not_stay_is_not_shared(load, others):
    load(**others)
    assert made_segments() == []


@pytest.mark.slow
def test_what_replaced_code_makes_is_another_processs_in_neither_direction(load, monkeypatch):
    plain = load().text_encoder_2.state_dict()
    plain = {name: each.clone() for name, each in plain.items()}
    convert = single_file_utils.convert_open_clip_checkpoint

    def convert_otherwise(*args, **kwargs):
        found = convert(*args, **kwargs)
        return {name: each.clone() + 1 for name, each in found.items()}

    with monkeypatch.context() as patch:
        patch.setattr(single_file_utils, "convert_open_clip_checkpoint", convert_otherwise)
        other = load().text_encoder_2.state_dict()
        assert any(not torch.equal(each, plain[name]) for name, each in other.items())
        del other
    again = load().text_encoder_2
    assert all(torch.equal(each, plain[name]) for name, each in again.state_dict().items())
    assert outside(again) == 0


def test_weights_that_the_file_lacks_are_drawn_by_each(mixture):
    [file] = mixture.path.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    nbytes = tensors.pop(name).nbytes
    save_file(tensors, file, {"format": "pt"})
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        model = shmload.load_model("AutoModelForCausalLM", mixture.path, keep=True)
        drawn.append(model.get_parameter(name).detach().clone())
        assert outside(model) == (nbytes if seed == 2 else 0)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_without_room_each_process_has_its_own(load, monkeypatch, caplog):
    def refuse(nbytes):
        raise CapacityError(nbytes, 0, "/dev/shm", "free some")

    monkeypatch.setattr(made, "_require_free", refuse)
    with caplog.at_level("INFO", "shmload"):
        pipe = load()
    assert outside(pipe.text_encoder_2) > 0
    assert made_segments() == []
    assert "weights of text_encoder_2 are not shared" in caplog.text
    assert "lie in no segment" in caplog.text


def test_segment_that_cannot_be_mapped_is_done_without(load, monkeypatch):
    load()

    def fail(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(made, "map_ranges", fail)
    assert outside(load().text_encoder_2) > 0


def test_memory_that_tensors_show_otherwise_or_modules_keep_stays(checkpoint):
    model = torch.nn.Module()
    model.register_buffer("shown", torch.ones(8192, dtype=torch.complex64).mul(1 + 1j).conj())
    model.register_parameter("kept", torch.nn.Parameter(torch.ones(8192)))
    model.register_parameter("free", torch.nn.Parameter(torch.full((8192,), 2.0)))
    model.view = model.kept.detach()[:2]
    memory = {name: each.untyped_storage() for name, each in model.state_dict().items()}
    private = {each.data_ptr(): each.nbytes() for each in memory.values()}
    found = resolve(Wanted(source=str(checkpoint)), checkpoint)
    segments, shared = made.share_made({"": model}, private, found)
    assert set(shared) == {memory["free"].data_ptr()}
    model.kept.data.add_(1)
    assert model.view.tolist() == [2, 2]
    assert model.shown[0] == 1 - 1j
    model.free.data.add_(1)  # copy-on-write
    [segment] = segments
    with segment:
        content = map_ranges(segment.fd, [(0, segment.nbytes)])
        begin = segment.read_header().data_offset
        assert torch.frombuffer(content, dtype=torch.float32, offset=begin)[0] == 2


def test_nothing_is_evicted_for_them(load, one_file, saved, configure):
    shmload.warm(saved("stable-diffusion"))
    shmload.warm(one_file("sdxl")[1])
    before = shmload.segments()
    configure(budget=sum(info.nbytes for info in before) + 20_000)
    pipe = load()
    assert [info.name for info in shmload.segments()] == [info.name for info in before]
    assert outside(pipe.text_encoder_2) > 0


# What stays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["path", "name", "part of the name"])
def test_they_go_with_their_file(load, one_file, by, command):
    load()
    path = one_file("sdxl")[1]
    called = {"path": path, "name": path.name, "part of the name": "model.safe"}[by]
    _, printed, _ = command("rm", "--dry-run", "--json", called)
    assert len(json.loads(printed)["removed"]) == 2
    assert len(shmload.evict(called)) == 2
    assert shmload.segments() == []


def test_of_a_changed_file_others_are_made(one_file, tmp_path):
    config, path = one_file("sdxl")
    own = shutil.copy(path, tmp_path)
    before = shmload.load_pipeline(own, config=config, keep=True)
    tensors = load_file(path)
    save_file({name: each * 2 for name, each in tensors.items()}, own)
    after = shmload.load_pipeline(own, config=config, keep=True)
    weights = [each.text_encoder_2.text_projection.weight for each in (before, after)]
    assert torch.equal(weights[0] * 2, weights[1])
    assert [info.is_current for info in made_segments()] == [False, True]
    del before, weights
    gc.collect()
    shmload.collect_garbage()
    assert [info.is_current for info in shmload.segments()] == [True, True]
    del after
