"""The dtype argument has one meaning under both of its names, in every function."""

import functools

import pytest

import shmload
from shmload.integrations import dataprep


def _enter(source, **kwargs):
    with shmload.view(source, **kwargs):
        pass


DOORS = {
    "load_pipeline": shmload.load_pipeline,
    "load_model": functools.partial(shmload.load_model, "AutoencoderKL"),
    "load_state_dict": shmload.load_state_dict,
    "warm": shmload.warm,
    "plan": shmload.plan,
    "view": _enter,
    "share": shmload.share,
    "Handle.of": shmload.Handle.of,
    "dataprep.Job": dataprep.Job,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_both_names_are_refused_before_the_source_is_looked_at(door):
    with pytest.raises(shmload.ArgumentError, match="dtype and torch_dtype are both given"):
        door("no/such/source", dtype="bfloat16", torch_dtype="bfloat16")


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_mistyped_name_is_refused_with_the_nearest(door, saved):
    with pytest.raises(
        shmload.ArgumentError, match=r"has no argument 'dtpye'.*; did you mean 'dtype'\?"
    ):
        door(saved("stable-diffusion"), dtpye="bfloat16")


def test_dict_that_names_another_component_is_refused(saved):
    source = saved("stable-diffusion")
    dtypes = {"unet": "bfloat16", "vea": "float16", "default": "float32"}
    for function in (shmload.load_pipeline, shmload.warm, shmload.plan, shmload.share):
        with pytest.raises(shmload.UnknownComponent, match=r"'vea'.*did you mean 'vae'"):
            function(source, dtype=dtypes)
