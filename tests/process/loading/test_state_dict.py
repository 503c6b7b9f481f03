"""`load_state_dict` gives the same tensors as safetensors, in shared memory."""

import gc
import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from comparing import as_bytes
from safetensors.torch import load_file, save_file

import shmload

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]


def make_tensors():
    """Return one tensor of every dtype, and some odd sizes."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, generator=generator)
    tensors = {
        f"{dtype}.{n}": numbers[:n].to(dtype, copy=True) for dtype in FLOATS for n in (1, 7, 1000)
    }
    others = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "complex64")
    for name in others:
        tensors[name] = torch.arange(-3, 97).to(getattr(torch, name)).reshape(4, 25)
    return tensors | {
        "bool": torch.arange(9) % 2 == 0,
        "scalar": torch.tensor(math.pi),
        "scalar.int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty.wide": torch.empty(3, 0, 5, dtype=torch.float16),
        "matrix": torch.randn(33, 65, generator=generator),
        'name with spaces, \N{GREEK SMALL LETTER ALPHA} and "quotes"': torch.ones(2),
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A file with tensors of every dtype."""
    path = tmp_path_factory.mktemp("single") / "model.safetensors"
    save_file(make_tensors(), path, {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The same tensors in three shards, with an index."""
    folder = tmp_path_factory.mktemp("sharded")
    tensors = list(make_tensors().items())
    weight_map = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(dict(tensors[number::3]), folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys((key for key, _ in tensors[number::3]), name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_state_equal(got, wanted, dtype=None):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        assert type(got[name]) is torch.Tensor
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].is_contiguous()
        assert as_bytes(got[name]) == as_bytes(tensor), name


# Equality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
def test_file_equals_safetensors(single, evicts, dtype, keep):
    got = shmload.load_state_dict(single, dtype, keep=keep)
    assert_state_equal(got, load_file(single), dtype)


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_shards_equal_safetensors(single, sharded, configure, evicts, dtype, keep, inline_nbytes):
    configure(inline_nbytes=inline_nbytes, workers=2)
    got = shmload.load_state_dict(sharded, dtype, keep=keep)
    assert_state_equal(got, load_file(single), dtype)
    assert len(shmload.segments()) == (3 if keep else 0)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="an older torch")
def test_half_bytes_equal_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    numbers = torch.arange(48, dtype=torch.uint8).reshape(6, 8)
    save_file({"a": numbers.view(torch.float4_e2m1fn_x2)}, path)
    got, wanted = (load(path)["a"] for load in (shmload.load_state_dict, load_file))
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(got.view(torch.uint8), numbers)


# Memory -------------------------------------------------------------------------------------------


# Tensors over the file itself, over a private segment, and over a resident segment.
KINDS = {"file": {}, "private": {"dtype": torch.bfloat16}, "resident": {"keep": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_has_a_storage_of_its_own(single, evicts, kind):
    state = shmload.load_state_dict(single, **KINDS[kind])
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values() if tensor.numel()}
    assert len(storages) == sum(tensor.numel() > 0 for tensor in state.values())
    for tensor in state.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0
    assert len(pickle.dumps(state["scalar"])) < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_default_device_is_for_what_the_program_makes(single, evicts, kind):
    with torch.device("meta"):
        state = shmload.load_state_dict(single, **KINDS[kind])
    assert all(tensor.is_cpu for tensor in state.values())


@pytest.mark.parametrize("kind", KINDS)
def test_writing_is_private(single, evicts, kind):
    before = single.read_bytes()
    state = shmload.load_state_dict(single, **KINDS[kind])
    for tensor in state.values():
        tensor.reshape(-1).view(torch.uint8).fill_(1)
    assert_state_equal(
        shmload.load_state_dict(single, torch.bfloat16), load_file(single), torch.bfloat16
    )
    shmload.verify()
    assert single.read_bytes() == before


def test_tensors_outlive_the_segment_and_the_file(tmp_path, single, shm_names):
    path = Path(shutil.copy(single, tmp_path))
    state = shmload.load_state_dict(path, torch.bfloat16, keep=True)
    (name,) = shm_names()
    Path("/dev/shm", name).unlink()  # like root, or the same user
    path.unlink()
    gc.collect()
    assert_state_equal(state, load_file(single), torch.bfloat16)


def test_last_tensor_keeps_the_lease_and_gives_it_back(single, shm_names, evicts):
    state = shmload.load_state_dict(single, torch.bfloat16, keep=True)
    kept = state["matrix"][3:5]
    wanted = kept.clone()
    del state
    gc.collect()
    (info,) = shmload.segments()
    assert info.is_leased
    with pytest.raises(shmload.SegmentBusy, match=r"model\.safetensors"):
        shmload.evict(single)
    assert torch.equal(kept, wanted)
    del kept
    gc.collect()
    assert not shmload.segments()[0].is_leased
    assert [removed.name for removed in shmload.evict(single)] == [info.name]
    assert shm_names() == []


def test_private_segment_has_no_name_and_goes_with_its_tensors(single, shm_names):
    before = os.listdir("/proc/self/fd")
    state = shmload.load_state_dict(single, torch.bfloat16)
    assert shm_names() == []
    assert_state_equal(state, load_file(single), torch.bfloat16)
    del state
    gc.collect()
    assert os.listdir("/proc/self/fd") == before
    assert "shmload-" not in Path("/proc/self/maps").read_text()


# Progress -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 30])
@pytest.mark.parametrize("error", [RuntimeError, OSError, BrokenPipeError])
def test_error_of_the_callback_ends_the_load(
    single, configure, shm_names, worker_pids, inline_nbytes, error
):
    configure(inline_nbytes=inline_nbytes, workers=1)

    def fail(done, total):
        raise error("the callback's own")

    with pytest.raises(error, match="the callback's own"):
        shmload.load_state_dict(single, torch.bfloat16, keep=True, progress=fail)
    assert (shm_names(), worker_pids()) == ([], [])


# Metadata -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_metadata_of_the_files_is_an_attribute(tmp_path, keep, evicts):
    for name, metadata in (("a", {"scale": "4", "own": "a"}), ("b", {"own": "b"}), ("c", None)):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors", metadata)
    index = {"weight_map": {name: f"{name}.safetensors" for name in "abc"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for dtype in (None, "float16"):
        found = shmload.load_state_dict(tmp_path, dtype, keep=keep)
        assert found.metadata == {"scale": "4", "own": "b"}
        alone = shmload.load_state_dict(tmp_path / "c.safetensors", dtype, keep=keep)
        assert alone.metadata == {}
