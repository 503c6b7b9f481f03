"""Any content of a checkpoint's index files gives a source or a typed error."""

import contextlib
import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.rule import likely_rule
from shmload._checkpoints.wanted import Wanted
from shmload.errors import (
    ArgumentError,
    CheckpointError,
    IndexMalformed,
    ShardMissing,
    ShmloadError,
    SourceNotFound,
)

_INDEX = "model.safetensors.index.json"
_SHARD = "a.safetensors"
FILES = [
    "model_index.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors.index.json",
]

_texts = st.text(max_size=6) | st.text("./\0\ud800\udcff-_a~\\", max_size=6)
_scalars = st.none() | st.booleans() | st.integers() | st.floats() | _texts
_json = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def component(tmp_path_factory):
    """A directory with one shard beside the index, and a shard outside of it."""
    folder = tmp_path_factory.mktemp("outer") / "component"
    folder.mkdir()
    (folder / _SHARD).touch()
    (folder.parent / "outside.safetensors").touch()
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outer") / "pipeline"
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / _SHARD).touch()
    write(folder / FILES[0], {"_class_name": "P", "vae": ["diffusers", "AutoencoderKL"]})
    write(folder / FILES[1], {"_class_name": "AutoencoderKL"})
    write(folder / FILES[2], {"weight_map": {"a": _SHARD}})
    return folder


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def index_of(folder, content):
    write(folder / _INDEX, content)
    return folder


@contextlib.contextmanager
def changed(path, content):
    """Replace a file's content inside the block."""
    before = path.read_bytes()
    write(path, content)
    try:
        yield
    finally:
        write(path, before)


def refusal(root):
    with pytest.raises(ShmloadError) as caught:
        resolve(Wanted(source=root), root)
    return caught.value


def shards_or_refusal(root):
    """Return the shards, after a check that all exist; None if the source is refused."""
    try:
        source = resolve(Wanted(source=root), root)
    except (CheckpointError, ArgumentError, SourceNotFound):
        return None
    shards = [shard for checkpoint in source.checkpoints for shard in checkpoint.shards]
    for shard in shards:
        assert shard.exists()
        assert shard.parent.parent in (root, root.parent)
    for checkpoint in source.checkpoints:
        likely_rule(checkpoint, "bfloat16")
    return shards


# Values -------------------------------------------------------------------------------------------


@given(_json)
def test_any_json_as_an_index_is_refused_or_names_shards_beside_it(component, content):
    shards_or_refusal(index_of(component, content))


@pytest.mark.parametrize("file", FILES)
def test_every_cut_and_every_changed_byte_is_a_source_or_a_typed_error(pipeline, file):
    path = pipeline / file
    content = path.read_bytes()
    with changed(path, content):
        for length in range(len(content)):
            write(path, content[:length])
            shards_or_refusal(pipeline)
        for place, was in enumerate(content):
            for value in {was ^ 1 << bit for bit in range(8)} | {0x00, 0xFF, *b'"\\/.{['}:
                write(path, content[:place] + bytes([value]) + content[place + 1 :])
                shards_or_refusal(pipeline)
    assert shards_or_refusal(pipeline) == [pipeline / "vae" / _SHARD]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "content",
    {
        "nothing": b"",
        "not UTF-8": b'{"a":"\xff\xfe"}',
        "a number without end": b'{"a":' + b"9" * 100_000 + b"}",
        "no object": b"[]",
        "arrays without end": b'{"a":' + b"[" * 1_000_000,
        "deep arrays": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    }.items(),
    ids=lambda item: item[0] if isinstance(item, tuple) else "",
)
def test_file_that_is_no_json_object_is_malformed_by_name(pipeline, file, content):
    with changed(pipeline / file, content[1]):
        error = refusal(pipeline)
    assert type(error) is IndexMalformed
    assert str(error).startswith(f"{pipeline / file}: ")
    assert "download the checkpoint again" in str(error)
    assert len(str(error)) < 600


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/../a.safetensors", "a/", "..", ".", ""]
)
def test_name_that_leads_elsewhere_is_malformed(component, pipeline, name):
    error = refusal(index_of(component, {"weight_map": {"a": _SHARD, "b": name}}))
    assert type(error) is IndexMalformed
    assert repr(name) in str(error)


@pytest.mark.parametrize("name", ["a\0b", "\0", "\ud800", "a" * 300, "é" * 200, "~", " "])
def test_name_that_no_file_can_have_is_missing(component, name):
    assert type(refusal(index_of(component, {"weight_map": {"a": name}}))) is ShardMissing


# Files --------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)  # opening a FIFO blocks, and /dev/zero never ends
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/dev/full", "directory", "loop", "gone"])
def test_index_that_is_no_file_is_malformed(tmp_path, kind):
    path = tmp_path / _INDEX
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case _:
            path.symlink_to(kind)
    error = refusal(tmp_path)
    assert type(error) is IndexMalformed
    assert str(path) in str(error)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", FILES)
def test_huge_file_is_refused_before_it_is_read(pipeline, file):
    path = pipeline / file
    with changed(path, path.read_bytes()):
        os.truncate(path, 1 << 40)
        tracemalloc.start()
        try:
            error = refusal(pipeline)
            assert tracemalloc.get_traced_memory()[1] < 150 << 20
        finally:
            tracemalloc.stop()
    assert type(error) is IndexMalformed
