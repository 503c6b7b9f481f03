"""Arguments of `load_pipeline` mean the same as in `from_pretrained`."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from comparing import assert_equal, reference

import shmload

pytestmark = pytest.mark.libraries


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
