"""`warm` makes sources resident once, and `plan` predicts what it will do."""

import functools
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from warming import NBYTES, SHM, TENSORS, as_bf16, assert_same

import shmload
from shmload._checkpoints.dtypes import dtype_by_component
from shmload._host.background import Background
from shmload._loading import progress
from shmload._segments.names import name_prefix

# Warm ---------------------------------------------------------------------------------------------


def test_second_warm_reads_nothing_and_changes_nothing(folder, shm_names):
    first = shmload.warm(folder, torch_dtype=torch.bfloat16)
    assert first.source == str(folder)
    assert first.read_nbytes == NBYTES
    assert sorted(first.segments) == shm_names()
    assert first.resident_nbytes == sum((SHM / name).stat().st_size for name in shm_names())
    assert 0 < first.times_s["reading"] < first.elapsed_s

    def written():
        return [(n, (SHM / n).stat().st_ino, (SHM / n).read_bytes()) for n in shm_names()]

    before = written()
    second = shmload.warm(folder, torch_dtype="bfloat16", progress=pytest.fail)
    assert second.read_nbytes == 0
    assert (second.segments, second.resident_nbytes) == (first.segments, first.resident_nbytes)
    assert written() == before


def test_report_tells_the_times_apart(saved, configure, tmp_path, monkeypatch):
    configure(cache_dir=tmp_path)  # no rule is remembered
    times = iter(range(1000))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(times)))
    source = saved("stable-diffusion")
    first, second = (shmload.warm(source, dtype="bfloat16") for _ in range(2))
    assert first.times_s["imports"] > 0
    assert first.times_s["dtype rules"] > 0
    assert first.times_s["reading"] > 0
    assert second.times_s["imports"] == second.times_s["reading"] == 0
    shmload.evict(source)


def test_segments_are_private_read_only_files(checkpoint, shm_names):
    shmload.warm(checkpoint)
    (name,) = shm_names()
    assert name.startswith(name_prefix())
    assert (SHM / name).stat().st_mode & 0o7777 == 0o400


def test_each_dtype_has_a_segment_of_its_own(checkpoint):
    names = {
        shmload.warm(checkpoint, torch_dtype=dtype).segments
        for dtype in (None, torch.bfloat16, torch.float16)
    }
    assert len(names) == 3
    # Requesting the file's own dtype gives the same segment as requesting none.
    assert shmload.warm(checkpoint, torch_dtype=torch.float32).segments in names


def test_segment_is_a_safetensors_file(checkpoint, shm_names):
    shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert_same(load_file(SHM / shm_names()[0]), as_bf16(TENSORS))


def test_file_that_two_components_share_is_decoded_once(tmp_path, evicts, shm_names):
    source = tmp_path / "pipeline"
    index = {name: ["nowhere", "Unknown"] for name in ("first", "second")}
    for name in index:
        (source / name).mkdir(parents=True)
    (source / "model_index.json").write_text(json.dumps(index))
    save_file(TENSORS, source / "first" / "model.safetensors")
    os.link(source / "first" / "model.safetensors", source / "second" / "model.safetensors")
    report = shmload.warm(source)
    assert report.read_nbytes == NBYTES
    assert list(report.segments) == shm_names()
    with shmload.view(source) as path:
        for name in index:
            assert (path / name / "model.safetensors").samefile(SHM / report.segments[0])


def test_rest_is_decoded_where_a_part_is_resident(folder):
    shard = folder / "model-00001-of-00003.safetensors"
    alone = shmload.warm(shard, torch_dtype=torch.bfloat16)
    report = shmload.warm(folder, torch_dtype=torch.bfloat16)
    assert set(alone.segments) < set(report.segments)
    assert report.read_nbytes == NBYTES - alone.read_nbytes


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_make_the_same_segments(folder, configure, workers, worker_pids):
    inline = shmload.warm(folder, torch_dtype=torch.bfloat16)
    digests = sorted(info.digest for info in shmload.segments())
    shmload.evict(folder)
    configure(inline_nbytes=0)
    seen = []
    report = shmload.warm(
        folder,
        torch_dtype=torch.bfloat16,
        workers=workers,
        progress=lambda *_: seen.append(len(worker_pids())),
    )
    assert set(seen) == {workers}
    assert report.segments == inline.segments
    assert sorted(info.digest for info in shmload.segments()) == digests
    assert worker_pids() == []


def test_source_without_weights_is_not_found(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(shmload.SourceNotFound, match=str(tmp_path)):
        shmload.warm(tmp_path)


@pytest.mark.parametrize("call", [shmload.warm, shmload.plan])
def test_misspelled_argument_is_refused(checkpoint, call):
    with pytest.raises(TypeError, match="tocrh_dtype"):
        call(checkpoint, tocrh_dtype=torch.bfloat16)


def test_interrupt_leaves_nothing(checkpoint, child, shm_names):
    process = child(
        """
import signal, sys, shmload
from shmload._loading.load import Load
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
end = Load._end
def say_and_end(load, **how):
    if not load._cancelled.is_set():
        load._cancelled.set()
        print("CLOSING", flush=True)
    return end(load, **how)
Load._end = say_and_end
def stop(done, total):
    print("AT", flush=True)
    sys.stdin.readline()
shmload.warm(sys.argv[1], torch_dtype="bfloat16", progress=stop)
""",
        checkpoint,
    )
    process.expect("AT")
    assert [name.endswith(".part") for name in shm_names()] == [True]
    process.process.send_signal(signal.SIGINT)
    process.expect("CLOSING")
    process.say()
    assert process.wait() != 0
    assert "KeyboardInterrupt" in process.errors
    assert shm_names() == []


def test_interrupt_at_the_start_of_the_thread_leaves_nothing(checkpoint, monkeypatch, shm_names):
    start = Background.start

    def start_and_be_interrupted(background):
        start(background)
        background.join_undisturbed()  # all is decoded and published
        assert shm_names() != []
        raise KeyboardInterrupt

    monkeypatch.setattr(Background, "start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        shmload.warm(checkpoint, dtype="bfloat16")
    assert shm_names() == []


# Plan ---------------------------------------------------------------------------------------------


def test_plan_says_what_will_be_done_and_does_nothing(folder, shm_names):
    planned = shmload.plan(folder, torch_dtype=torch.bfloat16, keep=True)
    assert shm_names() == []
    assert planned.source == str(folder)
    # The middle shard has no floats to convert.
    assert [shard.conversion for shard in planned.shards] == ["BF16", "raw", "BF16"]
    assert {shard.action for shard in planned.shards} == {shmload.Action.DECODE}
    assert sum(shard.read_nbytes for shard in planned.shards) == NBYTES
    assert [shard.tensors for shard in planned.shards] == [1, 1, 1]
    report = shmload.warm(folder, torch_dtype=torch.bfloat16)
    assert report.segments == tuple(shard.segment for shard in planned.shards)
    assert planned.decode_nbytes == report.resident_nbytes
    after = shmload.plan(folder, torch_dtype=torch.bfloat16)
    assert {shard.action for shard in after.shards} == {shmload.Action.ATTACH}
    assert (after.decode_nbytes, after.resident_nbytes) == (0, report.resident_nbytes)


def test_plan_links_what_needs_no_segment(checkpoint):
    (shard,) = shmload.plan(checkpoint, torch_dtype=torch.float32).shards
    assert (shard.action, shard.segment_nbytes) == (shmload.Action.LINK, 0)
    (shard,) = shmload.plan(checkpoint, torch_dtype=torch.float32, keep=True).shards
    assert shard.action is shmload.Action.DECODE


@pytest.mark.parametrize("value", ["2h", "no", 7200, None])
def test_keep_that_is_no_bool_is_refused(checkpoint, value):
    def view(source, **kwargs):
        with shmload.view(source, **kwargs):
            raise AssertionError

    model = functools.partial(shmload.load_model, "UNet2DModel")
    for door in (shmload.load_pipeline, model, shmload.load_state_dict, shmload.plan, view):
        with pytest.raises(shmload.ArgumentError, match=r"True or False; .*warm\(keep_for=\)"):
            door(checkpoint, keep=value)
    with pytest.raises(shmload.ArgumentError, match="share is 'no'; it must be True or False"):
        shmload.load_pipeline(checkpoint, share="no")


def test_variant_that_is_not_there_is_said(folder, tmp_path):
    with pytest.raises(shmload.SourceNotFound, match="no weights of variant 'fp16'"):
        shmload.warm(folder, variant="fp16")
    other = tmp_path / "other"
    (other / "unet").mkdir(parents=True)
    (other / "model_index.json").write_text(
        json.dumps({"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]})
    )
    save_file(TENSORS, other / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(shmload.SourceNotFound, match="it has variant fp16"):
        shmload.warm(other)


@pytest.mark.libraries
def test_sharded_variant_is_found(saved):
    source = saved("flux", "float16", "fp16", sharded=True)
    assert len(shmload.plan(source, variant="fp16").shards) > 4


@pytest.mark.libraries
def test_dtype_of_an_unknown_component_is_an_error(saved):
    with pytest.raises(shmload.UnknownComponent, match="no component 'foo'"):
        shmload.plan(saved("flux"), torch_dtype={"foo": "float32"})
    with pytest.raises(shmload.ArgumentError, match="given twice"):
        dtype_by_component(["bfloat16", "vae=float32", "float16"])


def test_command_goes_on_after_a_bad_source(checkpoint, tmp_path, command):
    code, printed, said = command("warm", "--json", tmp_path / "missing", checkpoint)
    failed, warmed = json.loads(printed)["reports"]
    assert code == 1
    assert "no such file" in failed["error"]
    assert len(warmed["segments"]) == 1
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("Name unknown\nlong story")])
def test_hub_that_cannot_be_reached_is_one_sentence(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.model_info", fail)
    with pytest.raises(shmload.SourceNotFound) as caught:
        shmload.warm("models/sd")
    assert str(caught.value).startswith("models/sd: no such file or directory, and it cannot be")
    assert "\n" not in str(caught.value)
