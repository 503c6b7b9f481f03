"""Sources in a bucket and on a web server load like directories; no weight touches a disk."""

import gc
import json
import os
import sys
import time

import pytest
import single_files
import torch
from accelerated import assert_as_on_the_host_but_for_notes
from comparing import reference
from object_server import ObjectServer
from pipelines import build
from safetensors.torch import load_file, save
from warming import CHILD, begun
from watching import Watched, workers_of

import shmload
from shmload._checkpoints import mirror as mirror_module
from shmload._checkpoints import objects
from shmload._checkpoints.mirror import mirror
from shmload._checkpoints.remote import mirror_home, write_pointer
from shmload._checkpoints.wanted import Wanted

pytestmark = pytest.mark.libraries

URL = "s3://models/sd"


@pytest.fixture
def server(monkeypatch, configure, tmp_path, saved, evicts):
    """A server that has Stable Diffusion, as a bucket too; `url` is that of a web server."""
    configure(cache_dir=tmp_path / "cache", remote_timeout_s=9)
    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        objects._make_store.cache_clear()
        server.put_folder(saved("stable-diffusion"), "sd")
        yield server
    objects._make_store.cache_clear()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_pipeline_of_a_bucket(server, saved, dtype):
    got = shmload.load_pipeline(URL, dtype=dtype, keep=True)
    assert_as_on_the_host_but_for_notes(got, reference(saved("stable-diffusion"), dtype))
    assert got.name_or_path == URL
    assert got.unet.config._name_or_path == f"{URL}/unet"
    assert got.text_encoder.name_or_path == f"{URL}/text_encoder"
    resident = {segment.name for segment in shmload.segments()}
    weights = {name for name in server.asked if name.endswith(".safetensors")}
    assert len(resident) == len(weights) == 4
    biggest = max(len(content) for content in server.objects.values())
    for path in (mirror_home(URL) / "blobs").iterdir():  # no weight is written to a disk
        assert 512 * path.stat().st_blocks < max(biggest // 4, 64 << 10)
    server.asked.clear()
    again = shmload.load_pipeline(URL, dtype=dtype, keep=True)
    assert_as_on_the_host_but_for_notes(again, got)
    assert {segment.name for segment in shmload.segments()} == resident
    assert dict(server.asked) == {"list": 1}  # nothing else was replaced


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs", "az", "server"])
def test_pipeline_of_another_place(server, saved, kind):
    got = shmload.load_pipeline(f"{server.url_in(kind)}/sd", dtype=torch.bfloat16)
    assert_as_on_the_host_but_for_notes(got, reference(saved("stable-diffusion"), torch.bfloat16))


def test_one_file(server, tmp_path):
    pipe = build("stable-diffusion")
    pipe.save_pretrained(tmp_path / "config")
    path = single_files.write(pipe, tmp_path / "model.safetensors")
    server.objects["one/model.safetensors"] = path.read_bytes()
    given = {"config": str(tmp_path / "config"), "dtype": "bfloat16"}
    got = shmload.load_pipeline("s3://models/one/model.safetensors", **given)
    assert_as_on_the_host_but_for_notes(got, shmload.load_pipeline(path, **given))
    tensors = shmload.load_state_dict("s3://models/one/model.safetensors", "float16")
    stored = load_file(path)
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name].half()) for name in stored)


def test_the_mirror_leaves_the_garbage_collector_on(server):
    states = set()

    def note(name, count):
        if name.endswith(".json"):  # the weights come later
            states.add(gc.isenabled())
        return ""

    server.trouble = note
    shmload.load_model("AutoencoderKL", URL, subfolder="vae")
    assert states == {True}


# Commands -----------------------------------------------------------------------------------------


def test_warm_plan_and_evict_take_the_url(server):
    assert shmload.plan(URL, dtype="bfloat16").resident_nbytes == 0
    report = shmload.warm(URL, dtype="bfloat16")
    assert report.read_nbytes > 0
    assert shmload.warm(URL, dtype="bfloat16").read_nbytes == 0
    assert [model.name for model in shmload.models()] == [URL]
    assert {each.name for each in shmload.evict(URL)} == set(report.segments)


def test_offline_takes_the_mirror_as_it_is(server):
    with pytest.raises(shmload.SourceNotFound, match="local_files_only"):
        shmload.plan(URL, local_files_only=True)
    shmload.warm(URL)
    server.asked.clear()
    assert shmload.warm(URL, local_files_only=True).read_nbytes == 0
    assert not server.asked


# Changes and troubles -----------------------------------------------------------------------------


def test_replaced_object_gets_another_segment(server, saved):
    where = {"subfolder": "vae", "keep": True}
    first = shmload.load_model("AutoencoderKL", URL, **where).state_dict()
    name = "sd/vae/diffusion_pytorch_model.safetensors"
    server.objects[name] = server.objects[name][:-4] + b"\0\0\x80?"  # one
    second = shmload.load_model("AutoencoderKL", URL, **where).state_dict()
    assert [torch.equal(each, second[path]) for path, each in first.items()].count(False) == 1
    assert len(shmload.segments()) == 2


def test_object_that_is_replaced_during_the_load(server):
    name = "sd/vae/diffusion_pytorch_model.safetensors"

    def replace(asked, count):
        if asked == name and count == 1:  # the request for the header
            server.objects[name] = server.objects[name][::-1]
        return ""

    server.trouble = replace
    with pytest.raises(shmload.ShardChanged):
        shmload.load_model("AutoencoderKL", URL, subfolder="vae", keep=True)
    assert shmload.segments() == []


@pytest.mark.slow
@pytest.mark.parametrize("healthy", [0, 1, 3])
def test_server_that_answers_errors_to_everything_ends_each_load(
    server, configure, healthy, shm_names
):
    """However many answers come before: of the list, of small files, of headers."""
    configure(inline_nbytes=0, workers=1, remote_timeout_s=0.3)
    for url in (URL, f"{server.url}/sd"):
        server.asked.clear()
        server.trouble = lambda *_: "503" if server.asked.total() > healthy else ""
        began = time.monotonic()
        with pytest.raises((shmload.SourceNotFound, shmload.ShardUnreadable)) as caught:
            shmload.warm(url)
        assert time.monotonic() - began < 30
        assert "SHMLOAD_REMOTE_TIMEOUT_S" in str(caught.value)
        assert shm_names() == []


@pytest.mark.slow
def test_workers_leave_a_killed_loader_although_the_server_stalls(server, configure, child):
    configure(inline_nbytes=0, workers=2, remote_timeout_s=60)
    server.objects["t/model.safetensors"] = save({"a": torch.rand(300, 1000)})
    server.trouble = lambda name, count: "stall" if count > 1 else ""  # all but the header
    loader = child(CHILD, "warm", "s3://models/t/model.safetensors")
    begun(loader)
    loader.expect("AT")
    workers = Watched(workers_of(loader.pid))
    assert workers.pids
    loader.end()
    workers.wait_for_the_end()
    assert not server.released.is_set()


LOAD_FORK_AND_LOAD = """
import faulthandler, os, sys
import shmload
shmload.load_state_dict(sys.argv[1])
if os.fork() == 0:
    faulthandler.dump_traceback_later(20, exit=True)
    try:
        shmload.load_state_dict(sys.argv[2])
    except shmload.SourceNotFound as exc:
        print("REFUSED", exc, flush=True)
    os._exit(0)
print("ENDED", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_forked_child_is_told_that_it_cannot_ask(server, child):
    server.objects["a.safetensors"] = server.objects["b.safetensors"] = save({"a": torch.ones(9)})
    urls = (f"s3://models/{name}.safetensors" for name in "ab")
    process = child(LOAD_FORK_AND_LOAD, *urls)
    assert "spawn" in process.expect("REFUSED")
    assert process.expect("ENDED") == "0"


def test_nothing_there(server):
    with pytest.raises(shmload.SourceNotFound, match="nothing is there that is read"):
        shmload.warm("s3://models/none")
    with pytest.raises(shmload.SourceNotFound, match="only safetensors are read"):
        shmload.warm("s3://models/model.gguf")


def test_secrets_are_neither_sent_on_nor_logged(server, caplog):
    with caplog.at_level("DEBUG"):
        shmload.warm(URL)
        server.trouble = lambda *_: "403"
        with pytest.raises(shmload.ShmloadError) as caught:
            shmload.load_state_dict(f"{URL}/unet/other.safetensors")
    assert "not to be seen" not in caplog.text + str(caught.value)
    assert not any("not to be seen" in told for told in server.told)


def test_names_that_would_leave_the_mirror_are_left_out(server, tmp_path):
    server.objects["bad/../../x.json"] = b"{}"
    server.objects["bad/config.json"] = b"{}"
    with pytest.raises(shmload.SourceNotFound):
        shmload.warm("s3://models/bad")
    assert {path.name for path in mirror_home("s3://models/bad").rglob("*.json")} <= {"config.json"}


def test_pointer_of_another_is_not_followed(server, tmp_path):
    path = tmp_path / "model.safetensors"
    write_pointer(path, objects.describe(f"{URL}/vae/diffusion_pytorch_model.safetensors"))
    server.asked.clear()
    with pytest.raises(shmload.ShardMalformed, match="not in shmload's cache"):
        shmload.load_state_dict(path)
    assert not server.asked


def test_without_obstore_the_package_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    objects._obstore.cache_clear()
    with pytest.raises(shmload.LibraryError, match=r"pip install .*shmload\[cloud\]"):
        shmload.warm(URL)
    objects._obstore.cache_clear()


# Web servers, and what is not read ----------------------------------------------------------------


@pytest.mark.slow
def test_shards_of_a_variant_on_a_web_server(server, saved, tmp_path):
    unet = reference(saved("stable-diffusion"), torch.float16).unet
    unet.save_pretrained(tmp_path, variant="fp16", max_shard_size="100KB")
    server.put_folder(tmp_path, "shards")
    given = {"variant": "fp16", "dtype": torch.float16}
    got = shmload.load_model("UNet2DConditionModel", f"{server.url}/shards", **given).state_dict()
    assert all(torch.equal(got[path], tensor) for path, tensor in unet.state_dict().items())


def test_index_may_not_name_too_many_files(server, monkeypatch):
    monkeypatch.setattr(mirror_module, "MOST_OBJECTS", 59)
    names = {f"t{number}": f"model-{number}.safetensors" for number in range(60)}
    index = json.dumps({"weight_map": names}).encode()
    server.objects["unet/model.safetensors.index.json"] = index
    with pytest.raises(shmload.SourceNotFound, match="more than 59 files"):
        shmload.warm(f"{server.url}/unet")
    assert len(server.told) < 60


def test_bytes_that_do_not_come_name_the_object_and_a_remedy(server, configure):
    configure(remote_timeout_s=1)
    server.trouble = lambda name, count: "503" if count > 1 else ""  # all but the header
    with pytest.raises(shmload.ShardUnreadable) as caught:
        shmload.load_model("AutoencoderKL", URL, subfolder="vae")
    assert str(caught.value).startswith(f"{URL}/vae/diffusion_pytorch_model.safetensors cannot be")
    assert "check the network and the credentials" in str(caught.value)
    assert "disk" not in str(caught.value)
    assert "SHMLOAD_REMOTE_TIMEOUT_S sets for how long" in str(caught.value)


def test_cache_without_a_place_is_named(server, configure):
    configure(cache_dir="/dev/null/nowhere")
    with pytest.raises(
        shmload.SourceNotFound, match=r"cannot be written: .*; set SHMLOAD_CACHE_DIR"
    ):
        shmload.warm(URL)


# Mirrors ------------------------------------------------------------------------------------------


def test_mirror_that_is_in_use_does_not_change(server):
    name = "sd/vae/config.json"
    first = mirror(Wanted(source=URL))
    before = (first / "vae/config.json").read_bytes()
    server.objects[name] = before + b"\n"
    second = mirror(Wanted(source=URL))
    assert (first / "vae/config.json").read_bytes() == before
    assert (second / "vae/config.json").read_bytes() == before + b"\n"


@pytest.mark.parametrize(
    "harm", [lambda path: path.chmod(0o606), lambda path: os.truncate(path, 3)]
)
def test_blob_that_others_could_have_written_or_that_is_cut_is_made_anew(server, harm):
    root = mirror(Wanted(source=URL))
    wanted = (root / "unet/config.json").read_bytes()
    harm((root / "unet/config.json").resolve())
    server.asked.clear()
    assert (mirror(Wanted(source=URL)) / "unet/config.json").read_bytes() == wanted
    assert dict(server.asked) == {"list": 1, "sd/unet/config.json": 1}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("what", ["", "blobs", "trees", "trees/*"])
def test_mirror_of_another_user_is_not_taken(server, what):
    pointer = mirror(Wanted(source=URL)) / "vae" / "diffusion_pytorch_model.safetensors"
    for path in mirror_home(URL).glob(what) if what else [mirror_home(URL)]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    if not what.startswith("trees"):
        with pytest.raises(shmload.ShardMalformed, match="belongs to user"):
            shmload.load_state_dict(pointer)
    for offline, match in ((False, "SHMLOAD_CACHE_DIR"), (True, "local_files_only")):
        with pytest.raises(shmload.SourceNotFound, match=match):
            shmload.plan(URL, local_files_only=offline)
