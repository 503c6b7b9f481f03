"""The arguments of public functions are parsed into one value, the same way everywhere."""

import pytest

import shmload
from shmload._checkpoints.wanted import Hub, Wanted


def parse(dtype=None, /, **kwargs):
    """Parse some arguments; return the parsed value and the arguments that are left."""
    flags = {name: kwargs.pop(name, False) for name in ("is_pipeline", "has_others")}
    return Wanted.parse(
        "source", dtype, ["vae"], "fp16", kwargs, function=shmload.warm, **flags
    ), kwargs


def test_arguments_become_one_value():
    wanted, _ = parse("bf16", revision="main", token=False)
    hub = Hub(revision="main", token=False)
    assert wanted == Wanted(
        source="source", dtype="bf16", components=["vae"], variant="fp16", hub=hub
    )


def test_none_means_the_default():
    wanted, _ = parse(revision=None, local_files_only=None)
    assert wanted.hub == Hub()


def test_older_name_of_the_dtype_is_taken_out():
    wanted, left = parse(torch_dtype="bf16", has_others=True)
    assert (wanted.dtype, left) == ("bf16", {})


def test_older_name_may_be_none_beside_the_dtype():
    assert parse("bf16", torch_dtype=None)[0].dtype == "bf16"


def test_first_unknown_argument_is_named():
    with pytest.raises(shmload.ArgumentError, match="has no argument 'a'"):
        parse(b=1, a=1, revision="main")


def test_arguments_of_others_stay():
    wanted, left = parse(revision="main", safety_checker=None, has_others=True)
    assert wanted.hub == Hub(revision="main")
    assert left == {"revision": "main", "safety_checker": None}


def test_pipeline_has_no_subfolder():
    assert parse(subfolder="vae")[0].hub.subfolder == "vae"
    with pytest.raises(shmload.ArgumentError, match="has no argument 'subfolder'"):
        parse(subfolder="vae", is_pipeline=True)
    assert parse(subfolder="vae", is_pipeline=True, has_others=True)[0].hub == Hub()
