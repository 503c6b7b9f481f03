"""Arguments of `load_pipeline` mean the same as in `from_pretrained`."""

import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from comparing import assert_equal, assert_loads_equal, reference

import shmload
from shmload._building.attempt import Attempt
from shmload._devices import destination
from shmload._loading import holdings

pytestmark = pytest.mark.libraries


def test_optional_component_passed_in_is_the_one_used(saved, evicts):
    source = saved("wan")
    mine = diffusers.WanTransformer3DModel.from_pretrained(source / "transformer")
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, transformer=mine, keep=True)
    assert got.transformer is mine
    assert_equal(got, reference(source, torch.bfloat16, transformer=mine))
    decoded = {Path(info.source).parent.name for info in shmload.segments()}
    assert decoded == {"text_encoder", "vae"}


def test_component_passed_as_none_is_left_out(saved, evicts):
    source = saved("stable-diffusion")
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, safety_checker=None, keep=True)
    assert got.safety_checker is None
    decoded = {Path(info.source).parent.name for info in shmload.segments()}
    assert decoded == {"text_encoder", "unet", "vae"}
    assert_loads_equal(source, "bf16", safety_checker=None)


def test_tokenizer_and_scheduler_passed_in_are_the_ones_used(saved):
    source = saved("flux")
    other = reference(source)
    got = shmload.load_pipeline(
        source, torch_dtype=torch.bfloat16, tokenizer=other.tokenizer, scheduler=other.scheduler
    )
    assert got.tokenizer is other.tokenizer
    assert got.scheduler is other.scheduler


@pytest.mark.usefixtures("either_order")
@pytest.mark.filterwarnings("ignore:unclosed file")  # diffusers, with disable_mmap
@pytest.mark.parametrize(
    "kwargs",
    [
        {"low_cpu_mem_usage": False},
        {"use_safetensors": True},
        {"local_files_only": True},
        {"dtype": torch.bfloat16},
        {"disable_mmap": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_other_arguments_reach_the_library(saved, kwargs):
    source = saved("sd3")
    dtype = None if "dtype" in kwargs else torch.bfloat16
    got = shmload.load_pipeline(source, torch_dtype=dtype, **kwargs)
    wanted = reference(
        source, torch.bfloat16, **{key: value for key, value in kwargs.items() if key != "dtype"}
    )
    assert_equal(got, wanted)


def test_mistyped_keyword_is_refused_before_a_weight_is_read(saved, shm_names):
    source = saved("stable-diffusion")
    for name in ("torch_dtpye", "kept"):
        with pytest.raises(shmload.UnknownArgument, match=f"has no argument {name!r}.*did you"):
            shmload.load_pipeline(source, progress=pytest.fail, share=True, **{name: True})
    assert shm_names() == []


def test_float64_is_equal(saved):
    source = saved("flux")
    got = shmload.load_pipeline(source, torch_dtype=torch.float64)
    assert_equal(got, reference(source, torch.float64))


def test_float8_is_equal_where_the_library_can(saved):
    # transformers cannot build a model in float8.
    dtype = {"transformer": torch.float8_e4m3fn, "default": torch.bfloat16}
    source = saved("flux")
    assert_equal(shmload.load_pipeline(source, torch_dtype=dtype), reference(source, dtype))


def test_threads_that_load_at_once_get_what_they_asked_for(saved, configure, tmp_path):
    configure(cache_dir=tmp_path)  # so that the rules are derived too
    sources = [saved("stable-diffusion"), saved("wan"), saved("flux")] * 2
    with ThreadPoolExecutor(len(sources)) as pool:
        load = partial(shmload.load_pipeline, torch_dtype=torch.bfloat16)
        pipes = list(pool.map(load, sources))
    for source, pipe in zip(sources, pipes, strict=True):
        assert_equal(pipe, reference(source, torch.bfloat16))


# Errors -------------------------------------------------------------------------------------------


def error_of(call, *args, **kwargs):
    with pytest.raises(Exception) as raised:  # noqa: PT011 of any kind
        call(*args, **kwargs)
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("kwargs", [{}, {"device_map": "cuda:0", "max_host_memory": "1MiB"}])
def test_missing_variant_is_an_error_before_room_is_asked_for(
    saved, accelerators, monkeypatch, kwargs
):
    source = saved("stable-diffusion")
    monkeypatch.setattr(holdings, "OpenShard", None)  # not even a header is read
    got = error_of(shmload.load_pipeline, source, dtype="bfloat16", variant="fp17", **kwargs)
    assert got == error_of(reference, source, torch.bfloat16, variant="fp17")
    assert got[0] is ValueError


@pytest.mark.parametrize("limit", [{"max_host_memory": "1MiB"}, {}])
def test_error_of_the_library_is_not_taken_for_one_of_memory(
    copied, accelerators, monkeypatch, limit
):
    source = copied("stable-diffusion")
    index = json.loads((source / "model_index.json").read_text())
    del index["unet"]
    (source / "model_index.json").write_text(json.dumps(index))
    ways = []
    go = Attempt._go
    monkeypatch.setattr(Attempt, "_go", lambda self, way: [ways.append(way), go(self, way)][1])
    monkeypatch.setattr(destination, "source_nbytes", lambda source: 1 << 40)  # so a ring is used
    got = error_of(shmload.load_pipeline, source, dtype="bfloat16", device_map="cuda:0", **limit)
    assert got == error_of(reference, source, torch.bfloat16)
    assert [bool(way.ring) for way in ways] == [True]


def test_error_of_a_model_that_read_its_weights_too_early_says_so(saved, accelerators, monkeypatch):
    plain = diffusers.AutoencoderKL.from_pretrained

    def load_and_read(cls, *args, **kwargs):
        model = plain(*args, **kwargs)
        if not any(bool(tensor.any()) for tensor in model.parameters()):
            raise ValueError("all weights are zero")
        return model

    monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", classmethod(load_and_read))
    with pytest.raises(shmload.MemoryLimitExceeded, match="all weights are zero"):
        shmload.load_pipeline(
            saved("stable-diffusion"), device_map="cuda:0", max_host_memory="1MiB"
        )


def test_dduf_file_is_the_librarys_business(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.dduf", "w") as file:
        file.writestr("model_index.json", "{}")
    with pytest.raises((ValueError, OSError, KeyError)) as wanted:
        diffusers.DiffusionPipeline.from_pretrained(tmp_path, dduf_file="a.dduf")
    with pytest.raises(type(wanted.value)) as got:
        shmload.load_pipeline(tmp_path, dduf_file="a.dduf")
    assert str(got.value) == str(wanted.value)
    assert not isinstance(got.value, shmload.ShmloadError)
