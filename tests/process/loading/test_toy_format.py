"""A new format of checkpoint files needs one module; all public functions then load it.

The format is `toy_format`: tensors in any order with gaps, and a trailer instead of a header.
"""

import json
import os

import pytest
import torch
from comparing import DTYPES, assert_equal, reference
from safetensors.torch import load_file
from toy_format import TOY, save_toy
from warming import NBYTES, SHM, TENSORS, as_bf16, assert_same

import shmload
from shmload._checkpoints.formats import known

raw_and_cast = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _is_known(monkeypatch):
    monkeypatch.setattr(known, "FORMATS", (*known.FORMATS, TOY))


@pytest.fixture
def toy(tmp_path, evicts):
    """A checkpoint of one file."""
    path = tmp_path / "weights.toy"
    save_toy(TENSORS, path)
    return path


@pytest.fixture
def toy_folder(tmp_path, evicts):
    """A component of three shards with an index."""
    path = tmp_path / "component"
    path.mkdir()
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = f"toy-{number + 1:05}-of-00003.toy"
        save_toy({name: tensor}, path / weight_map[name], seed=number)
    (path / "toy.toy.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def wanted(dtype):
    return TENSORS if dtype is None else as_bf16(TENSORS)


@raw_and_cast
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("inline_nbytes", [0, 1 << 20], ids=["workers", "inline"])
def test_file_is_loaded(toy, configure, dtype, keep, inline_nbytes):
    configure(inline_nbytes=inline_nbytes, workers=2)
    assert_same(shmload.load_state_dict(toy, dtype, keep=keep), wanted(dtype))
    assert len(shmload.segments()) == keep


@raw_and_cast
def test_folder_of_shards_is_loaded(toy_folder, dtype):
    assert_same(shmload.load_state_dict(toy_folder, dtype), wanted(dtype))


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_bytes_makes_the_same_tensors(tmp_path, evicts, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{number}.{dtype}": torch.randn(number * 7 % 40, generator=generator).to(dtype)
        for number in range(30)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    save_toy(tensors, tmp_path / "weights.toy", seed)
    assert_same(shmload.load_state_dict(tmp_path / "weights.toy"), tensors)
    assert_same(shmload.load_state_dict(tmp_path / "weights.toy", "bfloat16"), as_bf16(tensors))


@raw_and_cast
def test_segment_is_listed_verified_and_removed_like_any(toy_folder, shm_names, dtype):
    report = shmload.warm(toy_folder, torch_dtype=dtype)
    assert report.read_nbytes == NBYTES
    assert shmload.warm(toy_folder, torch_dtype=dtype).read_nbytes == 0
    listed = shmload.segments()
    assert {info.source for info in listed} == set(map(str, toy_folder.glob("*.toy")))
    assert {info.conversion for info in listed} <= {"raw", "BF16"}
    verified = {info.name for info in shmload.verify()}
    assert verified == set(shm_names()) == set(report.segments)
    merged = {}
    for name in report.segments:
        merged |= load_file(SHM / name)
    assert_same(merged, wanted(dtype))
    del merged  # they are in use as long as they are mapped
    assert len(shmload.evict(toy_folder)) == 3
    assert shm_names() == []


def test_file_is_decoded_even_with_the_wanted_dtypes(toy):
    (shard,) = shmload.plan(toy).shards
    assert shard.action is shmload.Action.DECODE  # no library can map this format
    assert (shard.tensors, shard.read_nbytes) == (len(TENSORS), NBYTES)
    assert shard.segment_nbytes > 0


def test_content_tells_the_format_before_the_name(toy):
    path = toy.rename(toy.with_name("model.safetensors"))
    assert_same(shmload.load_state_dict(path), TENSORS)


def test_damaged_file_is_refused_by_the_format_of_its_name(toy):
    os.truncate(toy, os.path.getsize(toy) - 1)
    with pytest.raises(shmload.ShardMalformed, match=rf"^{toy} is not a valid toy file: .*trailer"):
        shmload.load_state_dict(toy)


def test_errors_name_each_format(tmp_path):
    with pytest.raises(shmload.SourceNotFound, match="or GGUF or toy weights"):
        shmload.warm(tmp_path)


def test_safetensors_are_preferred(toy_folder, checkpoint):
    checkpoint.rename(toy_folder / checkpoint.name)
    (shard,) = shmload.plan(toy_folder).shards
    assert shard.path.name == "model.safetensors"


def test_variants_are_found(tmp_path, evicts):
    save_toy(TENSORS, tmp_path / "toy.fp16.toy")
    report = shmload.warm(tmp_path, variant="fp16")
    assert report.read_nbytes == NBYTES
    with pytest.raises(shmload.SourceNotFound):
        shmload.warm(tmp_path)


# Views --------------------------------------------------------------------------------------------


def test_view_of_a_file_has_a_safetensors_name(toy):
    with shmload.view(toy, torch_dtype="bfloat16") as path:
        assert path.name == "weights.safetensors"
        assert_same(load_file(path), as_bf16(TENSORS))


def test_view_of_shards_has_an_index_of_safetensors(toy_folder):
    (toy_folder / "config.json").write_text("{}")
    with shmload.view(toy_folder) as path:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        names = {f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)}
        assert set(index["weight_map"].values()) == names
        assert index["weight_map"].keys() == TENSORS.keys()
        assert set(os.listdir(path)) == names | {"model.safetensors.index.json", "config.json"}
        assert_same({k: v for name in names for k, v in load_file(path / name).items()}, TENSORS)
    assert not path.exists()


def test_view_keeps_files_of_a_format_that_was_not_loaded(toy_folder, checkpoint):
    checkpoint.rename(toy_folder / checkpoint.name)
    with shmload.view(toy_folder, torch_dtype="bfloat16") as path:
        assert set(os.listdir(path)) == set(os.listdir(toy_folder))
        assert (path / "toy.toy.index.json").is_symlink()


@pytest.mark.libraries
@pytest.mark.parametrize("dtype", ["bf16", "none"])
def test_pipeline_with_toy_components_is_equal(copied, evicts, dtype):
    given, meant = DTYPES[dtype]
    source = copied("stable-diffusion")
    wanted = reference(source, meant)
    for path, toy_name in {
        "vae/diffusion_pytorch_model.safetensors": "toy_model.toy",
        "text_encoder/model.safetensors": "toy.toy",
    }.items():
        save_toy(load_file(source / path), (source / path).with_name(toy_name))
        (source / path).unlink()
    assert_equal(shmload.load_pipeline(source, torch_dtype=given), wanted)
