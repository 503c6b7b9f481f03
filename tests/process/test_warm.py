"""Residency: what `warm` leaves is served as long as it is true, shared, checked, and removed."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shmload
from shmload._identity import name_prefix

SHM = Path("/dev/shm")
TENSORS = {
    "a.weight": torch.randn(300, 40, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(77),
    "c": torch.tensor(1.5),
}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())

# A child that warms or loads its sources. It says what it does, and stops at each progress report
# until it is told to go on.
CHILD = """
import logging, sys
import shmload
how, *sources = sys.argv[1:]
class Say(logging.Handler):
    def emit(self, record):
        if "awaited" in record.msg:
            print("BEGUN", record.getMessage(), flush=True)
logging.getLogger("shmload").addHandler(Say())
logging.getLogger("shmload").setLevel(logging.INFO)
def stop(done, total):
    print("AT", done, total, flush=True)
    sys.stdin.readline()
print("READY", flush=True)
for source in sources:
    if how == "race":
        sys.stdin.readline()
        report = shmload.warm(source, torch_dtype="bfloat16")
    elif how == "warm":
        report = shmload.warm(source, torch_dtype="bfloat16", progress=stop)
    else:
        state = shmload.load_state_dict(source, "bfloat16", progress=stop)
        print("LOADED", float(state["a.weight"].double().sum()), flush=True)
        sys.stdin.readline()
        continue
    print("READ", report.read_nbytes, *report.segments, flush=True)
"""


@pytest.fixture
def checkpoint(tmp_path, evicts):
    """A file of its own for each test."""
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.parent.mkdir()
    save_file(TENSORS, path, {"format": "pt"})
    return path


@pytest.fixture
def folder(tmp_path, evicts):
    """A component of three shards, with an index and a configuration that names no class."""
    path = tmp_path / "component"
    path.mkdir()
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensor}, path / shard, {"format": "pt"})
        weight_map[name] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


def begun(process):
    """Wait until a child has its parts or has found out whose they are; returns what it logs."""
    process.expect("READY")
    return process.expect("BEGUN")


def damage(name, offset, value=None):
    """Change one byte of a segment, as faulty memory would."""
    path = SHM / name
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1 if value is None else value]))
    path.chmod(0o400)


def as_bf16(tensors):
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


# Warm ---------------------------------------------------------------------------------------------


def test_second_warm_reads_nothing_and_changes_nothing(folder, shm_names):
    first = shmload.warm(folder, torch_dtype=torch.bfloat16)
    assert first.source == str(folder)
    assert first.read_nbytes == NBYTES
    assert sorted(first.segments) == shm_names()
    assert first.resident_nbytes == sum((SHM / name).stat().st_size for name in shm_names())
    assert first.elapsed_s > 0

    def written():
        return [(n, (SHM / n).stat().st_ino, (SHM / n).stat().st_ctime_ns) for n in shm_names()]

    before = written()
    second = shmload.warm(folder, torch_dtype="bfloat16", progress=pytest.fail)
    assert second.read_nbytes == 0
    assert (second.segments, second.resident_nbytes) == (first.segments, first.resident_nbytes)
    assert written() == before


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
    # In its own dtype the file makes the same segment, asked for or not.
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
import sys, shmload
from shmload._load import Load
close = Load.close
def say_and_close(load):
    load._is_cancelled.set()
    print("CLOSING", flush=True)
    close(load)
Load.close = say_and_close
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


# Plan ---------------------------------------------------------------------------------------------


def test_plan_says_what_will_be_done_and_does_nothing(folder, shm_names):
    planned = shmload.plan(folder, torch_dtype=torch.bfloat16, keep=True)
    assert shm_names() == []
    assert planned.source == str(folder)
    # The middle shard has no floats, so nothing is to be converted.
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


# Several processes --------------------------------------------------------------------------------


def test_processes_that_race_decode_each_source_once(tmp_path, child, evicts, shm_names):
    sources = []
    for number in range(4):
        sources.append(tmp_path / f"{number}.safetensors")
        save_file(TENSORS | {"number": torch.tensor(float(number))}, sources[-1])
    racers = [child(CHILD, "race", *sources) for _ in range(3)]
    for racer in racers:
        racer.expect("READY")
    for _ in sources:
        for racer in racers:
            racer.say()
        results = []
        for racer in racers:
            racer.expect("BEGUN")
            results.append(racer.expect("READ").split())
        assert sum(int(read) for read, _ in results) == NBYTES + 4
        assert len({segment for _, segment in results}) == 1
    assert len(shmload.verify()) == len(shm_names()) == len(sources)


def test_second_process_waits_for_the_first(checkpoint, child):
    first = child(CHILD, "warm", checkpoint)
    assert "1 shards to decode" in begun(first)
    first.expect("AT")
    second = child(CHILD, "warm", checkpoint)
    assert "1 awaited" in begun(second)
    assert shmload.segments() == []
    first.say()
    read, name = first.expect("READ").split()
    assert int(read) == NBYTES
    assert second.expect("READ").split() == ["0", name]
    assert [info.name for info in shmload.verify()] == [name]


def test_part_of_a_killed_process_is_taken_over(checkpoint, child, shm_names):
    first = child(CHILD, "warm", checkpoint)
    begun(first)
    first.expect("AT")
    first.end()
    (part,) = shm_names()
    assert part.endswith(".part")
    assert shmload.segments() == []
    report = shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert report.read_nbytes == NBYTES
    assert shm_names() == list(report.segments) == [part.removesuffix(".part")]
    assert len(shmload.verify()) == 1
    assert_same(shmload.load_state_dict(checkpoint, torch.bfloat16, keep=True), as_bf16(TENSORS))


def test_part_of_a_process_killed_with_its_workers_at_work_is_taken_over(
    tmp_path, child, configure, shm_names, evicts
):
    # Its workers hold the part too, until they notice.
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(8_000_000, dtype=torch.int32).view(torch.float32)}, path)
    configure(inline_nbytes=0, workers=2)
    first = child(CHILD, "warm", path)
    begun(first)
    first.expect("AT")
    first.end()
    assert len(shm_names()) == 1
    report = shmload.warm(path, torch_dtype=torch.bfloat16)
    assert report.read_nbytes == 32_000_000
    assert shm_names() == list(report.segments)
    assert len(shmload.verify()) == 1


def test_waiting_process_takes_over_from_one_that_is_killed(checkpoint, child):
    first, second = child(CHILD, "warm", checkpoint), None
    begun(first)
    first.expect("AT")
    second = child(CHILD, "warm", checkpoint)
    assert "1 awaited" in begun(second)
    first.end()
    second.expect("AT")
    second.say()
    assert int(second.expect("READ").split()[0]) == NBYTES
    assert len(shmload.verify()) == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_waiting_has_a_deadline(checkpoint, child, configure, stopped):
    first = child(CHILD, "warm", checkpoint)
    begun(first)
    first.expect("AT")
    if stopped:
        first.process.send_signal(signal.SIGSTOP)
    configure(wait_timeout_s=0.2)
    with pytest.raises(shmload.SegmentTimeout, match="SHMLOAD_WAIT_TIMEOUT_S") as caught:
        shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert caught.value.name in str(caught.value)
    if not stopped:
        first.say()
        assert first.expect("READ").split()[1] == caught.value.name


def test_warm_makes_resident_what_another_process_decodes_for_itself(checkpoint, child):
    private = child(CHILD, "load", checkpoint)
    begun(private)
    private.expect("AT")
    warming = child(CHILD, "warm", checkpoint)
    assert "1 awaited" in begun(warming)
    private.say()
    private.expect("LOADED")
    # It may attach the other's segment or decode on its own; resident it has to be.
    line = warming._read_line()
    if line.startswith("AT"):
        warming.say()
        line = warming._read_line()
    assert line.startswith("READ ")
    private.end()
    assert warming.wait() == 0
    assert [info.name for info in shmload.segments()] == line.split()[2:]
    assert len(shmload.verify()) == 1


def test_private_load_uses_what_another_process_warms(checkpoint, child):
    warming = child(CHILD, "warm", checkpoint)
    begun(warming)
    warming.expect("AT")
    private = child(CHILD, "load", checkpoint)
    assert "1 awaited" in begun(private)
    warming.say()
    warming.expect("READ")
    wanted = float(TENSORS["a.weight"].bfloat16().double().sum())
    assert float(private.expect("LOADED")) == wanted
    assert [info.is_leased for info in shmload.segments()] == [True]


# A source that changes ----------------------------------------------------------------------------


def replace_file(path, tensors):
    fresh = path.with_suffix(".new")
    save_file(tensors, fresh, {"format": "pt"})
    fresh.replace(path)


def overwrite_in_place(path, tensors):
    fresh = path.with_suffix(".new")
    save_file(tensors, fresh, {"format": "pt"})
    with path.open("r+b") as file:
        file.write(fresh.read_bytes())
    fresh.unlink()


def overwrite_and_set_the_clock_back(path, tensors):
    before = path.stat()
    overwrite_in_place(path, tensors)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change", [replace_file, overwrite_in_place, overwrite_and_set_the_clock_back]
)
def test_changed_source_is_not_served(checkpoint, change):
    old = shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert [info.is_current for info in shmload.segments()] == [True]
    changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
    assert (len(changed), checkpoint.stat().st_size) == (3, checkpoint.stat().st_size)
    change(checkpoint, changed)
    assert [info.is_current for info in shmload.segments()] == [False]
    (shard,) = shmload.plan(checkpoint, torch_dtype=torch.bfloat16).shards
    assert shard.action is shmload.Action.DECODE
    new = shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert new.read_nbytes == NBYTES
    assert new.segments != old.segments
    assert_same(shmload.load_state_dict(checkpoint, torch.bfloat16, keep=True), as_bf16(changed))
    assert {info.name: info.is_current for info in shmload.segments()} == {
        old.segments[0]: False,
        new.segments[0]: True,
    }


def test_source_that_is_gone_is_not_current(checkpoint):
    shmload.warm(checkpoint)
    checkpoint.unlink()
    assert [info.is_current for info in shmload.segments()] == [False]


def test_copy_is_another_source_and_a_link_is_not(checkpoint, tmp_path):
    name = shmload.warm(checkpoint).segments
    shutil.copy2(checkpoint, tmp_path / "copy.safetensors")
    assert shmload.warm(tmp_path / "copy.safetensors").segments != name
    (tmp_path / "link.safetensors").symlink_to(checkpoint)
    assert shmload.warm(tmp_path / "link.safetensors").segments == name


# Listing and checking -----------------------------------------------------------------------------


def test_segments_say_what_they_are(checkpoint, tmp_path):
    before = time.time()
    first = shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    other = tmp_path / "other.safetensors"
    save_file(TENSORS, other)
    shmload.warm(other)
    listed = shmload.segments()
    assert [info.source for info in listed] == [str(checkpoint), str(other)]
    info = listed[0]
    assert info.name == first.segments[0]
    assert info.nbytes == first.resident_nbytes == (SHM / info.name).stat().st_size
    assert [info.conversion for info in listed] == ["BF16", "raw"]
    assert before - 1 < info.created_at < time.time() + 1
    assert f"pid {os.getpid()}" in info.creator
    assert shmload.__version__ in info.creator
    assert len(info.digest) == 32
    assert (info.is_leased, info.is_current) == (False, True)


def test_what_is_no_segment_is_not_listed(checkpoint):
    (name,) = shmload.warm(checkpoint).segments
    for planted in (f"{name_prefix()}x", f"{name_prefix()}{'g' * 30}", f"{name}.bak", "sem.other"):
        (SHM / planted).write_bytes(b"x")
    (SHM / f"{name_prefix()}{'0' * 30}").symlink_to(SHM / name)
    (SHM / f"{name_prefix()}{'1' * 30}").mkdir()
    os.mkfifo(SHM / f"{name_prefix()}{'2' * 30}")
    try:
        assert [info.name for info in shmload.segments()] == [name]
        assert [info.name for info in shmload.verify()] == [name]
        assert shmload.collect_garbage() == []
    finally:
        (SHM / "sem.other").unlink()


@pytest.mark.parametrize("offset", [4096, 4096 + 1000, -1])
def test_flipped_byte_is_found(checkpoint, tmp_path, offset):
    (name,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    other = tmp_path / "other.safetensors"
    save_file(TENSORS, other)
    shmload.warm(other)
    assert [info.name for info in shmload.verify(name)] == [name]
    damage(name, offset)
    for check in (
        shmload.verify,
        lambda: shmload.verify(name),
        lambda: shmload.verify(str(checkpoint)),
        lambda: shmload.warm(checkpoint, torch_dtype=torch.bfloat16, verify=True),
        lambda: shmload.load_state_dict(checkpoint, torch.bfloat16, verify=True),
        lambda: shmload.view(checkpoint, torch_dtype=torch.bfloat16, verify=True).__enter__(),
    ):
        with pytest.raises(shmload.SegmentCorrupt, match=name) as caught:
            check()
        assert f"shmload rm {name}" in str(caught.value)
    assert len(shmload.verify(str(other))) == 1
    shmload.evict(name)
    assert shmload.warm(checkpoint, torch_dtype=torch.bfloat16, verify=True).read_nbytes == NBYTES


def cut(name):
    (SHM / name).chmod(0o600)
    os.truncate(SHM / name, 4096 + 64)


def cut_into_the_header(name):
    (SHM / name).chmod(0o600)
    os.truncate(SHM / name, 100)


def empty(name):
    (SHM / name).chmod(0o600)
    os.truncate(SHM / name, 0)


def break_header(name):
    damage(name, 8, ord("["))


def break_metadata(name):
    path = SHM / name
    place = path.read_bytes().index(b'shmload.created_at":"') + len(b'shmload.created_at":"')
    damage(name, place, ord("x"))


@pytest.mark.parametrize("harm", [cut, cut_into_the_header, empty, break_header])
def test_segment_with_a_broken_header_is_found_and_can_be_removed(checkpoint, shm_names, harm):
    (name,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    harm(name)
    shmload.segments()  # whether it lists it is its own affair
    for check in (shmload.verify, lambda: shmload.verify(name)):
        with pytest.raises(shmload.SegmentCorrupt, match=name):
            check()
    with pytest.raises(shmload.ShmloadError, match=name):
        shmload.load_state_dict(checkpoint, torch.bfloat16)
    shmload.evict(name)
    assert shm_names() == []


def test_segment_with_odd_metadata_is_no_crash(checkpoint):
    (name,) = shmload.warm(checkpoint).segments
    break_metadata(name)
    with contextlib.suppress(shmload.SegmentCorrupt):
        assert len(shmload.segments()) <= 1
        shmload.verify()
    shmload.evict(name)


# Removing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spell",
    [
        lambda path, name: name,
        lambda path, name: str(path),
        lambda path, name: path,
        lambda path, name: str(path.parent),
        lambda path, name: f"{path.parent}/",
        lambda path, name: os.path.relpath(path),
        lambda path, name: f"{path.parent}/../{path.parent.name}/{path.name}",
    ],
    ids=["name", "source", "path", "directory", "slash", "relative", "roundabout"],
)
def test_evict_takes_names_and_sources(checkpoint, tmp_path, shm_names, spell):
    (name,) = shmload.warm(checkpoint).segments
    other = tmp_path / "checkpoint2" / "model.safetensors"  # not below "checkpoint"
    other.parent.mkdir()
    shutil.copy(checkpoint, other)
    (kept,) = shmload.warm(other).segments
    assert [info.name for info in shmload.evict(spell(checkpoint, name))] == [name]
    assert shm_names() == [kept]


def test_evict_wants_to_know_what(checkpoint, monkeypatch, shm_names):
    shmload.warm(checkpoint)
    before = shm_names()
    with pytest.raises(ValueError, match="evict"):
        shmload.evict()
    with pytest.raises(shmload.SegmentNotFound, match="'nothing'"):
        shmload.evict("nothing")
    with pytest.raises(shmload.SegmentNotFound, match="'nothing'"):
        shmload.verify("nothing")
    # An empty shell variable is not the current directory.
    monkeypatch.chdir(checkpoint.parent)
    with pytest.raises((ValueError, shmload.SegmentNotFound)):
        shmload.evict("")
    assert shm_names() == before


def test_evict_leaves_the_leased_and_takes_the_rest(folder, child):
    names = shmload.warm(folder, torch_dtype=torch.bfloat16).segments
    holder = child(CHILD, "load", folder / "model-00001-of-00003.safetensors")
    begun(holder)
    holder.expect("LOADED")
    with pytest.raises(shmload.SegmentBusy) as caught:
        shmload.evict(folder)
    assert caught.value.names == names[:1]
    assert names[0] in str(caught.value)
    assert [info.name for info in shmload.segments()] == [names[0]]
    holder.end()
    assert [info.name for info in shmload.evict(folder)] == [names[0]]


def test_garbage_is_what_nobody_can_use(checkpoint, tmp_path, child, shm_names):
    (current,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    sources = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for source in sources:
        save_file(TENSORS, source)
    (outdated,) = shmload.warm(sources[0]).segments
    killed, alive = (child(CHILD, "warm", source) for source in sources[1:])
    for process in (killed, alive):
        begun(process)
        process.expect("AT")
    parts = set(shm_names()) - {current, outdated}
    assert shmload.collect_garbage() == []
    killed.end()
    sources[0].unlink()
    garbage = set(shmload.collect_garbage())
    assert garbage == {outdated, *(parts - set(shm_names()))}
    alive.say()
    (living,) = alive.expect("READ").split()[1:]
    assert f"{living}.part" in parts
    assert shm_names() == sorted([current, living])


def test_outdated_segment_in_use_is_no_garbage(checkpoint, child):
    (name,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    holder = child(CHILD, "load", checkpoint)
    begun(holder)
    holder.expect("LOADED")
    checkpoint.unlink()
    assert shmload.collect_garbage() == []
    holder.end()
    assert shmload.collect_garbage() == [name]


def test_view_of_a_killed_process_is_garbage_once_it_is_old(checkpoint, child, shm_names):
    process = child(
        "import sys, shmload\n"
        "with shmload.view(sys.argv[1], torch_dtype='bfloat16') as path:\n"
        "    print('PATH', path, flush=True)\n"
        "    sys.stdin.read()\n",
        checkpoint,
    )
    view = Path(process.expect("PATH")).parent
    old = time.time() - 3600
    os.utime(view, (old, old))
    assert shmload.collect_garbage() == []  # it is in use
    process.end()
    assert shmload.collect_garbage() == [view.name]
    assert shm_names() == []


# Views --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_view_of_a_file_is_a_file_of_that_name(checkpoint, shm_names, keep):
    with shmload.view(checkpoint, torch_dtype=torch.bfloat16, keep=keep) as path:
        assert path.name == checkpoint.name
        assert "." not in str(path.parent)  # some libraries split whole paths at dots
        found = load_file(path)
    assert not path.exists()
    assert_same(found, as_bf16(TENSORS))  # still mapped
    assert len(shm_names()) == keep
    assert len(shmload.segments()) == keep


def test_view_of_a_directory_has_all_that_is_in_it(folder):
    (folder / "extra" / "deep").mkdir(parents=True)
    (folder / "extra" / "deep" / "notes.txt").write_text("notes")
    (folder / "dangling").symlink_to("nowhere")
    with shmload.view(folder, torch_dtype=torch.bfloat16) as path:
        assert sorted(os.listdir(path)) == sorted(os.listdir(folder))
        assert (path / "extra" / "deep" / "notes.txt").read_text() == "notes"
        assert (path / "config.json").samefile(folder / "config.json")
        found = {}
        for shard in path.glob("*.safetensors"):
            found |= load_file(shard)
        # Private: nobody else may even list it.
        assert path.stat().st_mode & 0o7777 == 0o700
    assert_same(found, as_bf16(TENSORS))
    assert not path.exists()
    assert (folder / "extra" / "deep" / "notes.txt").exists()  # what a view removes is links


def test_view_is_removed_whatever_happens_in_it(checkpoint, shm_names):
    with (
        pytest.raises(RuntimeError, match="mine"),
        shmload.view(checkpoint, torch_dtype=torch.bfloat16),
    ):
        raise RuntimeError("mine")
    assert shm_names() == []


def test_views_of_one_source_do_not_disturb_each_other(checkpoint):
    with shmload.view(checkpoint, torch_dtype=torch.bfloat16, keep=True) as first:
        with shmload.view(checkpoint, torch_dtype=torch.bfloat16) as second:
            assert first != second
        assert_same(load_file(first), as_bf16(TENSORS))
        assert [info.is_leased for info in shmload.segments()] == [True]
        with pytest.raises(shmload.SegmentBusy):
            shmload.evict(checkpoint)
    assert [info.is_leased for info in shmload.segments()] == [False]


def test_view_of_a_pipeline_replaces_the_weights_of_some_components(tmp_path, evicts):
    source = tmp_path / "pipeline"
    index = {"_class_name": "P"}
    for name in ("unet", "vae"):
        (source / name).mkdir(parents=True)
        save_file(TENSORS, source / name / "diffusion_pytorch_model.safetensors")
        index[name] = ["nowhere", "Unknown"]
    (source / "model_index.json").write_text(json.dumps(index))
    with shmload.view(source, components=["vae"], keep=True) as path:
        assert (path / "unet").samefile(source / "unet")
        assert not (path / "vae").samefile(source / "vae")
        assert_same(load_file(path / "vae" / "diffusion_pytorch_model.safetensors"), TENSORS)
    assert len(shmload.segments()) == 1
    with pytest.raises(shmload.UnknownComponent, match=r"'vea'.*unet, vae"):
        shmload.warm(source, components=["vea"])


# The hub's cache ----------------------------------------------------------------------------------


def test_model_is_found_in_the_hub_cache_by_id(hub_cache, folder):
    snapshot = hub_cache.add("org/name", folder)
    where = {"torch_dtype": torch.bfloat16, "cache_dir": hub_cache.root}
    report = shmload.warm("org/name", **where)
    assert report.read_nbytes == NBYTES
    assert {Path(info.source).parent for info in shmload.segments()} == {snapshot}
    assert shmload.warm("org/name", **where, revision="main").read_nbytes == 0
    assert shmload.warm("org/name", **where, revision="a" * 40).read_nbytes == 0
    assert shmload.warm(snapshot, torch_dtype=torch.bfloat16).read_nbytes == 0
    with shmload.view("org/name", **where) as path:
        assert (path / "config.json").read_text() == "{}"
    assert len(shmload.evict(snapshot)) == 3


def test_files_of_the_hub_cache_are_known_by_their_sha256(hub_cache, folder):
    where = {"torch_dtype": torch.bfloat16, "cache_dir": hub_cache.root}
    first = hub_cache.add("org/name", folder)
    names = shmload.warm("org/name", **where).segments
    # Another revision of another repository with the same files, written anew.
    hub_cache.add("org/copy", folder, "b" * 40)
    assert shmload.warm("org/copy", **where).read_nbytes == 0
    assert shmload.warm("org/copy", **where).segments == names
    for blob in (first.parents[1] / "blobs").iterdir():
        os.utime(blob)
    assert shmload.warm("org/name", **where).read_nbytes == 0
    assert all(info.is_current for info in shmload.segments())


def test_only_a_hub_caches_blobs_are_known_by_their_names(tmp_path, checkpoint):
    # The same name elsewhere proves nothing.
    path = tmp_path / "files" / ("a" * 64)
    path.parent.mkdir()
    shutil.copy(checkpoint, path)
    before = shmload.warm(path).segments
    os.utime(path)
    assert shmload.warm(path).segments != before


def test_model_that_is_not_in_the_cache_is_not_found(hub_cache, folder):
    with pytest.raises(shmload.SourceNotFound, match=r"org/nothing.*HF_HUB_OFFLINE"):
        shmload.warm("org/nothing", cache_dir=hub_cache.root)
    hub_cache.add("org/name", folder)
    with pytest.raises(shmload.SourceNotFound, match="org/name"):
        shmload.warm("org/name", cache_dir=hub_cache.root, revision="other")


def test_model_that_is_half_in_the_cache_names_the_missing_file(hub_cache, folder):
    snapshot = hub_cache.add("org/name", folder)
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(shmload.ShardMissing, match="model-00002-of-00003"):
        shmload.warm("org/name", cache_dir=hub_cache.root)
    assert shmload.segments() == []
