"""Segments are shown as the models that a person knows."""

import os

import pytest

from shmload._checkpoints.identity import identify
from shmload._segments.grouping import group_segments
from shmload._segments.listing import SegmentInfo
from shmload._segments.models import find_models
from shmload._segments.roots import Root, find_roots, root_at, tell_apart
from shmload._segments.selection import match_name
from shmload._segments.users import User, describe_user, name_users
from shmload.errors import SegmentNotFound

_SD = Root(path="/models/sd15")
_XL = Root(path="/models/sdxl")
_CACHE = "/home/me/.cache/huggingface/hub"


def segment(key, source, *, dtype="bfloat16", identity="", nbytes=100, **given):
    return SegmentInfo(
        name=f"shmload-0-{key}",
        source=source,
        conversion="BF16",
        nbytes=nbytes,
        created_at=given.pop("created_at", 10.0),
        creator=given.pop("creator", ""),
        digest="",
        is_leased=given.pop("is_leased", False),
        is_current=given.pop("is_current", True),
        used_at=given.pop("used_at", 20.0),
        is_pinned=given.pop("is_pinned", False),
        dtype=dtype,
        identity=identity or source,
        **given,
    )


def group(found, *roots, shards=None, users=None):
    by_source = {
        info.source: root
        for info in found
        for root in roots
        if info.source.startswith(root.path + "/") or info.source == root.path
    }
    return group_segments(found, by_source, shards or {}, users or {})


def sd(component, **given):
    source = f"/models/sd15/{component}/model.safetensors"
    return segment(given.pop("key", component), source, **given)


def test_segments_of_one_source_are_a_model():
    serving = User(pid=7, command="python serve.py", program="serve.py")
    found = [
        sd("vae", nbytes=5, created_at=3.0, used_at=4.0),
        sd("unet", nbytes=90, is_leased=True, used_at=9.0, is_pinned=True),
    ]
    (model,) = group(found, _SD, users={"shmload-0-unet": (serving,)})
    assert (model.name, model.dtype, model.nbytes) == ("sd15", "bfloat16", 95)
    assert model.components == ("unet", "vae")
    assert (model.created_at, model.used_at, model.source) == (3.0, 9.0, "/models/sd15")
    assert (model.is_leased, model.used_by) == (True, (serving,))
    assert (model.is_pinned, model.pinned_segments, model.is_current) == (False, 1, True)
    assert model.shared_with == ()


def test_source_in_two_dtypes_is_two_models_that_share_what_is_there_once():
    found = [
        sd("unet", key="unet16"),
        sd("unet", key="unet32", dtype="float32"),
        sd("tokens", dtype="int8"),
    ]
    narrow, wide = group(found, _SD)
    assert [info.name for info in narrow.segments] == ["shmload-0-unet16", "shmload-0-tokens"]
    assert [info.name for info in wide.segments] == ["shmload-0-unet32", "shmload-0-tokens"]
    assert (narrow.name, wide.name) == ("sd15", "sd15")
    assert narrow.id != wide.id
    assert narrow.shared_with == ("sd15 (float32, int8)",)


def test_evicted_component_is_not_that_of_another_dtype():
    # float16 is whole; of bfloat16 the unet was evicted.
    found = [
        sd("unet", dtype="float16", creator="2"),
        sd("vae", key="vae16", dtype="float16", creator="2"),
        sd("vae", creator="1"),
    ]
    brain, half = group(found, _SD)
    assert [info.name for info in half.segments] == ["shmload-0-unet", "shmload-0-vae16"]
    assert [info.name for info in brain.segments] == ["shmload-0-vae"]
    assert (half.dtype, brain.dtype) == ("float16", "bfloat16")
    assert half.shared_with == brain.shared_with == ()


def test_evicted_shard_is_not_that_of_another_dtype_of_the_same_process():
    # A notebook has loaded in bfloat16, then in float16, which evicted a shard in bfloat16.
    def shard(number, dtype):
        source = f"/models/sd15/unet/{number}.safetensors"
        return segment(f"{number}{dtype}", source, dtype=dtype, creator="1")

    found = [shard(1, "float16"), shard(2, "float16"), shard(2, "bfloat16")]
    brain, half = group(found, _SD)
    assert (brain.dtype, brain.nbytes) == ("bfloat16", 100)
    assert (half.dtype, half.nbytes) == ("float16", 200)


def test_component_of_a_load_in_two_dtypes_is_also_that_of_the_one_that_is_whole():
    # A load in bfloat16 with a vae in float32, then one in float32.
    found = [
        sd("unet", creator="1"),
        sd("vae", dtype="float32", creator="1"),
        sd("unet", key="unet32", dtype="float32", creator="2"),
    ]
    mixed, wide = group(found, _SD)
    assert [info.name for info in mixed.segments] == ["shmload-0-unet", "shmload-0-vae"]
    assert [info.name for info in wide.segments] == ["shmload-0-vae", "shmload-0-unet32"]


def test_components_in_different_dtypes_are_one_model():
    (model,) = group([sd("vae", dtype="float32", nbytes=1), sd("unet")], _SD)
    assert model.dtype == "bfloat16, float32"


def test_models_with_the_same_file_share_its_segment():
    encoder = segment("t5", "/models/sd15/t5/model.safetensors", identity="1:2.3")
    own = segment("xl", "/models/sdxl/unet/model.safetensors")
    shards = {_XL.path: {"1:2.3": "text_encoder"}}
    first, second = group([sd("unet"), encoder, own], _SD, _XL, shards=shards)
    assert (first.components, second.components) == (("t5", "unet"), ("text_encoder", "unet"))
    assert (first.shared_with, second.shared_with) == (("sdxl",), ("sd15",))
    assert first.nbytes + second.nbytes == 400


def test_what_only_another_model_uses_is_no_model_of_its_own():
    encoder = segment("t5", "/models/sd15/t5/model.safetensors", identity="1:2.3")
    own = segment("xl", "/models/sdxl/unet/model.safetensors")
    shards = {_XL.path: {"1:2.3": "text_encoder"}}
    (model,) = group([encoder, own], _SD, _XL, shards=shards)
    assert (model.name, model.shared_with) == ("sdxl", ())


def test_segments_of_a_changed_source_are_a_model_apart():
    old, new = group([sd("unet", key="old", is_current=False), sd("unet")], _SD)
    assert (old.is_current, new.is_current) == (False, True)
    assert old.id != new.id


def test_versions_of_a_changed_source_are_models_apart():
    found = [
        sd("unet", key="a", identity="1", created_at=1.0, is_current=False),
        sd("vae", key="b", identity="2", created_at=1.0, is_current=False),
        sd("unet", key="c", identity="3", created_at=2.0, is_current=False),
    ]
    first, second = group(found, _SD)
    assert [info.name for info in first.segments] == ["shmload-0-a"]
    assert [info.name for info in second.segments] == ["shmload-0-b", "shmload-0-c"]
    assert first.id != second.id


def test_variants_are_models_apart(tmp_path):
    folders = [tmp_path / name for name in ("unet", "vae")]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").touch()
    (tmp_path / "unet" / "model.fp16.safetensors").touch()
    (tmp_path / "model_index.json").touch()
    plain, half, vae = (
        str(tmp_path / name)
        for name in (
            "unet/model.safetensors",
            "unet/model.fp16.safetensors",
            "vae/model.safetensors",
        )
    )
    keys = [identify(path, os.stat(path)).key for path in (plain, half, vae)]
    found = [
        segment(str(n), path, identity=key)
        for n, (path, key) in enumerate(zip((plain, half, vae), keys, strict=True))
    ]
    first, second = find_models(found)
    name = tmp_path.name
    assert (first.name, second.name) == (name, f"{name}:fp16")
    assert (first.variant, second.variant) == ("", "fp16")
    # The VAE has no files of the variant, so a load of the variant takes the plain ones.
    assert [info.source for info in first.segments] == [plain, vae]
    assert [info.source for info in second.segments] == [half, vae]
    assert second.source == first.source == str(tmp_path)
    assert first.id != second.id
    assert find_models(found[1:])[0].name == f"{name}:fp16"
    assert match_name(name, [first, second], found) == [first]
    assert match_name("fp16", [first, second], found) == [second]


def test_segment_that_cannot_be_read_has_its_own_name():
    (model,) = group([segment("0badc0de", "", dtype="")])
    assert (model.name, model.dtype) == ("shmload-0-0badc0de", "")


def test_id_stays_when_another_dtype_comes():
    (alone,) = group([sd("unet")], _SD)
    both = group([sd("unet"), sd("unet", key="wide", dtype="float32")], _SD)
    assert alone.id in {model.id for model in both}


# Where a model lies, and its name -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "component"),
    [("unet/model.safetensors", "unet"), ("model-00001-of-00002.safetensors", "")],
)
def test_snapshot_of_a_hub_cache_has_the_name_of_its_repository(inside, component):
    source = f"{_CACHE}/models--org--some-model/snapshots/0123456789abcdef/{inside}"
    root = find_roots([source])[source]
    assert (root.hub_id, root.component_of(source)) == ("org/some-model", component)
    assert list(root.names())[:2] == ["org/some-model", "org/some-model@0123456"]


def test_folder_above_with_an_index_is_the_pipeline(tmp_path):
    unet = tmp_path / "sd15" / "unet"
    unet.mkdir(parents=True)
    source = str(unet / "diffusion_pytorch_model.safetensors")
    (unet / "diffusion_pytorch_model.safetensors").touch()
    assert find_roots([source])[source].path == source
    (unet / "config.json").touch()
    assert find_roots([source])[source].path == str(unet)
    (tmp_path / "sd15" / "model_index.json").touch()
    assert find_roots([source])[source].path == str(tmp_path / "sd15")
    assert find_roots([source])[source].component_of(source) == "unet"


def test_numbered_files_are_one_model_without_a_configuration(tmp_path):
    sources = [str(tmp_path / f"model-0000{n}-of-00002.safetensors") for n in (1, 2)]
    assert {root.path for root in find_roots(sources).values()} == {str(tmp_path)}


def test_components_of_a_pipeline_that_is_gone_stay_together():
    sources = [f"/gone/sd15/{c}/model.safetensors" for c in ("unet", "text_encoder_2", "vae")]
    assert {root.path for root in find_roots(sources).values()} == {"/gone/sd15"}


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.fp16.safetensors"])
def test_model_that_is_gone_keeps_its_name(name):
    source = f"/gone/team/clip/{name}"
    root = find_roots([source])[source]
    assert root.path == "/gone/team/clip"
    assert next(root.names()) == "clip"
    assert find_roots(["/gone/lora.safetensors"])["/gone/lora.safetensors"].path.endswith(
        "lora.safetensors"
    )


@pytest.mark.parametrize("name", ["team-a/sd15", "models/team-a/sd15"])
def test_name_beside_others_is_a_name_when_alone(name):
    alone = segment("u", "/srv/models/team-a/sd15/unet/model.safetensors")
    models = group([alone], Root(path="/srv/models/team-a/sd15"))
    assert match_name(name, models, [alone]) == models
    with pytest.raises(SegmentNotFound):
        match_name(name.replace("team-a", "team-b"), models, [alone])


def test_revision_of_a_hub_id_is_a_name_when_alone():
    path = f"{_CACHE}/models--org--sd/snapshots/0123456789"
    alone = segment("u", f"{path}/unet/model.safetensors")
    models = group([alone], root_at(path, ""))
    assert models[0].name == "org/sd"
    assert match_name("org/sd@0123456", models, [alone]) == models


def test_names_are_the_shortest_that_differ():
    hub = [Root(path=f"/c/{n}", hub_id="org/model", revision=n * 40) for n in "ab"]
    paths = ["/a/x/sd", "/a/y/sd", "/b/flux", "/lora.safetensors"]
    named = tell_apart([*(Root(path=path) for path in paths), *hub])
    assert [named[path] for path in paths] == ["x/sd", "y/sd", "flux", "/lora.safetensors"]
    assert [named[root.path] for root in hub] == ["org/model@aaaaaaa", "org/model@bbbbbbb"]


def test_variant_is_called_like_its_source():
    roots = [Root(path=f"/m/{team}/sd") for team in "ab"]
    roots.append(Root(path="/m/a/sd", variant="fp16"))
    assert list(tell_apart(roots).values()) == ["a/sd", "b/sd", "a/sd:fp16"]


# Who uses it --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("/usr/bin/python3 -P /srv/serve.py --port 1", "serve.py"),
        ("python -m uvicorn app", "uvicorn"),
        ("python3.12 -c code", "python3.12"),
        ("python /run/user/0/shmload/template-cpython-311.pyc default", "shmload run"),
        ("/opt/server --x", "server"),
        ("", ""),
    ],
)
def test_process_is_called_by_its_program(command, program):
    assert describe_user(1, command.split()).program == program


def test_first_user_is_named_and_the_others_are_counted():
    users = [User(pid=pid, command="", program="a") for pid in (9, 4, 7)]
    assert (name_users(()), name_users(users[:1])) == ("", "9 a")
    assert name_users(users) == "4 a +2"
