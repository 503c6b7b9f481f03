"""Weights in PyTorch's own files are shared like those in safetensors, or left to the library."""

import json
import pickle

import pytest
import torch
from comparing import assert_equal, reference
from mappings import copied_nbytes
from safetensors.torch import load_file, save_file

import shmload

pytestmark = pytest.mark.libraries

_DTYPES = [None, torch.bfloat16, torch.float16]


def rewrite(source, save=torch.save):
    """Save a pipeline's weights as PyTorch's files, with their indices, in place of safetensors."""
    for path in sorted(source.glob("*/*.safetensors")):
        save(load_file(path), path.with_name(_as_pickle(path.name)))
        path.unlink()
    for path in sorted(source.glob("*/*.safetensors.index*.json")):
        index = json.loads(path.read_text())
        index["weight_map"] = {k: _as_pickle(v) for k, v in index["weight_map"].items()}
        path.with_name(_as_pickle(path.name)).write_text(json.dumps(index))
        path.unlink()
    return source


def _as_pickle(name):
    base = name.replace(".safetensors", ".bin")
    return base if base.startswith("diffusion_") else f"pytorch_{base}"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("stable-diffusion", dtype) for dtype in _DTYPES),
        ("flux", torch.bfloat16),
        ("wan", torch.bfloat16),
    ],
    ids=str,
)
def test_pipeline_is_that_of_the_library_and_shared(copied, family, dtype, evicts):
    source = rewrite(copied(family))
    got = shmload.load_pipeline(source, dtype=dtype, keep=True)
    assert_equal(got, reference(source, dtype))
    assert shmload.plan(source, dtype=dtype).left_out == ()
    resident = shmload.segments()
    again = shmload.load_pipeline(source, dtype=dtype, keep=True)
    assert_equal(again, got)
    assert copied_nbytes(again) == 0
    assert [each.name for each in shmload.segments()] == [each.name for each in resident]


def test_shards_and_variants(copied, evicts):
    source = rewrite(copied("flux", "float16", "fp16", sharded=True))
    variant = {"variant": "fp16"}
    got = shmload.load_pipeline(source, dtype=torch.bfloat16, keep=True, **variant)
    wanted = reference(source, torch.bfloat16, use_safetensors=False, **variant)
    assert_equal(got, wanted)
    planned = shmload.plan(source, dtype=torch.bfloat16, **variant)
    assert {shard.action for shard in planned.shards} == {shmload.Action.ATTACH}


def test_files_of_pytorch_that_are_asked_for_are_left_to_the_library(copied, evicts):
    source = rewrite(copied("stable-diffusion"))
    (path,) = (source / "vae").glob("*.bin")
    other = {name: tensor + 1 for name, tensor in torch.load(path).items()}
    save_file(other, path.with_suffix(".safetensors"))  # not what is asked for
    given = {"use_safetensors": False}
    wanted = reference(source, torch.bfloat16, **given)
    for _ in range(2):
        got = shmload.load_pipeline(source, dtype=torch.bfloat16, keep=True, **given)
        assert_equal(got, wanted)


def test_state_dict_of_views_of_one_storage(tmp_path):
    fused = torch.arange(24.0).reshape(6, 4)
    tensors = {"q": fused[:2], "k": fused[2:4], "all": fused, "tied": fused, "one": fused[0, 1]}
    torch.save(tensors, tmp_path / "model.pt")
    got = shmload.load_state_dict(tmp_path / "model.pt", "bfloat16")
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor.bfloat16()), name


# Left to the library ------------------------------------------------------------------------------


def _strided(tensors, path):
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 4 and 1 not in tensor.shape:
            found[name] = tensor.to(memory_format=torch.channels_last)
        elif tensor.ndim == 2:
            found[name] = tensor.t().contiguous().t()
    torch.save(found, path)


def _older(tensors, path):
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


@pytest.mark.slow
@pytest.mark.parametrize("save", [_strided, _older])
def test_what_is_not_read_is_left_to_the_library(copied, evicts, save):
    source = rewrite(copied("stable-diffusion"))
    (path,) = (source / "vae").glob("*.bin")
    save(torch.load(path), path)
    wanted = reference(source, torch.bfloat16)
    for _ in range(2):
        assert_equal(shmload.load_pipeline(source, dtype=torch.bfloat16, keep=True), wanted)
    (left,) = shmload.plan(source, dtype=torch.bfloat16).left_out
    assert (left.path, left.component) == (path, "vae")
    with pytest.raises(shmload.ShardMalformed, match="let the library load it"):
        shmload.load_state_dict(path)


class _Calls:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.slow
def test_nothing_in_a_pickle_is_called(tmp_path, copied, capfd):
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(2), "b": _Calls()}, path)
    with pytest.raises(
        shmload.ShardMalformed, match=r"does not unpickle \S*print; let the lib"
    ) as caught:
        shmload.warm(path)
    assert caught.value.path == path
    assert "print" in caught.value.why
    source = rewrite(copied("stable-diffusion"), lambda tensors, to: torch.save(_Calls(), to))
    with pytest.raises((OSError, pickle.UnpicklingError)) as wanted:
        reference(source)
    with pytest.raises(type(wanted.value)):
        shmload.load_pipeline(source)
    with pytest.raises(shmload.SourceNotFound, match=r"unet/.*does not unpickle \S*print"):
        shmload.warm(source)
    older = tmp_path / "older.pt"
    torch.save({"b": _Calls()}, older, _use_new_zipfile_serialization=False)
    with pytest.raises(shmload.ShardMalformed, match=r"the form of torch before 1\.6"):
        shmload.load_state_dict(older)
    assert "called" not in capfd.readouterr().out
