"""Segments are shown as the models that a person knows, and chosen by what they are called."""

import msgspec
import pytest
from listed import listed

from shmload._checkpoints.source import Source
from shmload._segments.listing import describe_user
from shmload._segments.metadata import Metadata, home_of
from shmload._segments.models import find_models
from shmload._segments.names import name_prefix


def segment(key, *, root="/m/sd15", component="", **given):
    source = f"{root}/{component}/model.safetensors"
    usual = {"source": source, "identity": source, "root": root, "model": root.rpartition("/")[2]}
    usual |= {"component": component, "dtype": "bfloat16"}
    return listed(f"{name_prefix()}{key:0>30}", **usual | given)


UNET, VAE = segment("1", component="unet", nbytes=90), segment("2", component="vae", nbytes=5)


def changed(info, **fields):
    return msgspec.structs.replace(info, **fields)


def test_file_that_is_there_in_several_dtypes_is_a_model_in_each():
    half = changed(UNET, name=f"{UNET.name[:-1]}a", dtype="float16")
    built = segment(
        "3", kept="whole", needs=(half.name, VAE.name), conversion="built", dtype="uint8"
    )
    found = [UNET, VAE, half, built]
    assert [(model.dtype, len(model.segments)) for model in find_models(found)] == [
        ("bfloat16", 2),
        ("float16", 2),
    ]
    assert len({model.id for model in find_models(found)}) == 2
    assert [model.dtype for model in find_models([UNET, VAE, built])] == ["bfloat16"]


def test_variants_and_changed_files_are_models_of_their_own():
    variant = changed(segment("4", component="unet"), variant="fp16", identity="other")
    old = changed(segment("5", component="unet"), is_current=False, identity="old")
    found = find_models([UNET, VAE, variant, old])
    assert [(model.name, model.is_current) for model in found] == [
        ("sd15", True),
        ("sd15:fp16", True),
        ("sd15", False),
    ]
    assert len({model.id for model in found}) == 3


def test_models_of_one_name_are_called_by_their_paths():
    other = segment("7", root="/n/sd15", component="unet")
    assert [model.name for model in find_models([UNET, other])] == ["/m/sd15", "/n/sd15"]


def home(model, root, component="", variant=""):
    return Metadata(model=model, root=root, component=component, variant=variant)


@pytest.mark.parametrize(
    ("root", "given", "model"),
    [
        ("/models/sd15", "/models/sd15", "sd15"),
        ("/c/models--org--sd/snapshots/0123", "org/sd", "org/sd"),
        ("/c/remote/1/trees/2/sd", "s3://bucket/sd", "s3://bucket/sd"),
    ],
)
def test_home_has_the_name_that_a_person_gives(root, given, model):
    source = Source(given=given, root=root, variant="fp16")
    assert home_of(source, "unet") == home(model, root, "unet", "fp16")


def test_folder_of_a_pipeline_is_a_component_of_it(tmp_path):
    root = tmp_path / "sd15" / "unet"
    root.mkdir(parents=True)
    assert home_of(Source(given=root, root=root), "") == home("unet", str(root))
    (tmp_path / "sd15" / "model_index.json").touch()
    of_pipeline = home("sd15", str(tmp_path / "sd15"), "unet")
    assert home_of(Source(given=root, root=root), "") == of_pipeline


# Who uses it --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("/usr/bin/python3 -P /srv/serve.py --port 1", "serve.py"),
        ("python -m uvicorn app", "uvicorn"),
        ("python3.12 -c code", "python3.12"),
        ("/opt/server --x", "server"),
        ("", ""),
    ],
)
def test_process_is_called_by_its_program(command, program):
    assert describe_user(1, command.split()).program == program
