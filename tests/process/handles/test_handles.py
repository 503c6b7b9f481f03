"""A shared pipeline lasts as long as a process holds it, and a handle alone gives access."""

import os
import pickle

import pytest
import torch
from comparing import assert_equal, reference

import shmload

CHILD = """
import os, signal, sys
import shmload
from shmload._loading.load import Load
loads, begin = [], Load._begin
Load._begin = lambda load: (loads.append(load), begin(load))
handle = shmload.Handle.from_text(sys.argv[1])
pipe = handle.load()
print("LOADED", sum(load.read_nbytes for load in loads), flush=True)
order = sys.stdin.readline().strip()
if order == "die":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def source(copied):
    return copied("stable-diffusion")


@pytest.fixture
def handle(source, evicts):
    with shmload.share(source, torch_dtype=torch.bfloat16) as shared:
        yield shared


def shared_names():
    return sorted(info.name for info in shmload.segments() if info.is_shared and info.is_leased)


@pytest.mark.libraries
def test_handle_is_small_and_gives_the_same_pipeline(handle, source):
    crossing = pickle.dumps(handle)
    assert len(crossing) < 4096
    pipe = pickle.loads(crossing).load()
    assert_equal(pipe, reference(str(source), torch.bfloat16))
    assert handle.load() is shmload.Handle.from_text(handle.text).load() is pipe


def test_equal_handles_have_one_text_and_one_pickle(saved):
    """By these datasets finds again what it has computed."""
    source, dtype = saved("stable-diffusion"), {"vae": "bfloat16", "default": "float16"}
    handle = shmload.Handle.of(source, dtype=dtype, components=["vae", "text_encoder"])
    turned = dict(reversed(dtype.items()))
    same = shmload.Handle.of(source, dtype=turned, components={"text_encoder", "vae"})
    for other in (same, pickle.loads(pickle.dumps(handle)), shmload.Handle.from_text(handle.text)):
        assert other == handle
        assert pickle.dumps(other) == pickle.dumps(handle)
    one = shmload.Handle.of(source, dtype=dtype, components=["vae"])
    assert pickle.dumps(one) != pickle.dumps(handle)


@pytest.mark.libraries
def test_nothing_is_decoded_twice(handle, child):
    names = shared_names()
    assert names
    first, second = child(CHILD, handle.text), child(CHILD, handle.text)
    for attached in (first, second):
        assert attached.expect("LOADED") == "0"
    assert shared_names() == names


def test_segments_go_with_their_last_holder(handle, child, shm_names):
    attached = child(CHILD, handle.text)
    attached.expect("LOADED")
    handle.close()
    assert shared_names()
    attached.say("go")
    assert attached.wait() == 0
    assert shm_names() == []


def test_what_killed_processes_leave_is_used_by_the_next(handle, source, child, copied, shm_names):
    attached = child(CHILD, handle.text)
    attached.expect("LOADED")
    names = shared_names()
    handle.close()
    attached.say("die")
    attached.wait()
    assert shm_names() == names
    assert not shared_names()  # no process holds them
    actions = {s.action for s in shmload.plan(source, torch_dtype="bf16").shards}
    assert actions == {shmload.Action.ATTACH}
    with shmload.share(copied("flux"), torch_dtype="bfloat16"):
        assert not set(names) & set(shm_names())  # to share removes what others left


def test_loading_shares_again_when_no_process_holds_the_segments(handle, shm_names):
    copy = pickle.loads(pickle.dumps(handle))
    handle.close()
    assert shm_names() == []
    pipe = copy.load()
    assert shared_names() == shm_names() != []
    copy.close()
    del pipe
    assert shm_names() == []


def test_pipeline_stays_until_the_last_of_equal_handles_is_closed(handle, source, shm_names):
    pipe = handle.load()
    for end in (shmload.Handle.close, id):  # it is closed, or dropped
        end(shmload.share(source, torch_dtype=torch.bfloat16))
        assert handle.load() is pipe
    with shmload.share(source, torch_dtype=torch.bfloat16) as equal:
        handle.close()
        assert equal.load() is pipe
    del pipe
    assert shm_names() == []


def test_sharing_what_is_resident_has_it_stay(source, shm_names, evicts):
    names = sorted(shmload.warm(source, torch_dtype=torch.bfloat16).segments)
    shmload.share(source, torch_dtype=torch.bfloat16).close()
    assert shm_names() == names


@pytest.mark.libraries
def test_replaced_source_is_an_error_and_no_mixture(handle, source):
    path = source / "vae" / "diffusion_pytorch_model.safetensors"
    os.utime(path, ns=(1, 1))
    handle.close()  # what this process has loaded it would keep
    with pytest.raises(shmload.ShardChanged, match="replaced since they were shared"):
        handle.load()


@pytest.mark.libraries
def test_only_the_named_components_are_decoded(source, evicts):
    with shmload.share(source, torch_dtype="bf16", components=["vae"]) as shared:
        (segment,) = shmload.segments()
        assert "vae" in segment.source
        pipe = shared.load()
        assert pipe.unet is None
        assert pipe.text_encoder is None
        assert pipe.tokenizer is not None
        wanted = reference(
            str(source), torch.bfloat16, unet=None, text_encoder=None, safety_checker=None
        )
        assert_equal(pipe, wanted)


@pytest.mark.libraries
@pytest.mark.parametrize(
    "name", ["model_index.json", "vae/config.json", "tokenizer/tokenizer_config.json"]
)
def test_changed_configuration_gives_another_handle(source, name):
    before, path = shmload.Handle.of(source, components=["vae"]), source / name
    path.write_bytes(content := path.read_bytes())  # a rewrite of the source changes nothing
    assert shmload.Handle.of(source, components=["vae"]) == before
    path.write_bytes(content + b"\n")
    assert shmload.Handle.of(source, components=["vae"]) != before
    with pytest.raises(shmload.ShardChanged):
        before.load()


@pytest.mark.libraries
@pytest.mark.parametrize(
    "name",
    ["unet/config.json", "README.md", "vae/.lock", "vae/other.safetensors", "vae/model.fp16.bin"],
)
def test_change_of_what_is_not_loaded_makes_no_difference(source, name):
    before = shmload.Handle.of(source, components=["vae"])
    with (source / name).open("a") as file:
        file.write("\n")
    assert shmload.Handle.of(source, components=["vae"]) == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"source": 1}, 2]', "\x00"])
def test_text_that_is_no_handle_is_refused(text):
    with pytest.raises(shmload.ArgumentError, match="not the text of a handle"):
        shmload.Handle.from_text(text)


def test_path_that_is_no_utf8_is_shared(source, shm_names):
    with shmload.share(source.rename(source.with_name("\udcff")), torch_dtype="bfloat16") as shared:
        pipe = shared.load()
        assert shared.text.isascii()
        assert_equal(shmload.Handle.from_text(shared.text).load(), pipe)
        assert shared.facts["dtype"] == '"bfloat16"'


def test_component_alone_cannot_be_shared(source):
    with pytest.raises(shmload.SourceNotFound, match="give a directory or hub id of one"):
        shmload.share(source / "vae")
