"""One process builds what the others wait for; what is kept needs room, and goes with its model."""

import contextlib
import gc
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from comparing import assert_equal, reference
from diffusers import StableDiffusionPipeline
from remembering import BF16, change_weights_at_the_same_time, kept, load
from warming import idle_for

import shmload
from shmload._building import keeping
from shmload._building.makers import PipelineMaker
from shmload._loading import room
from shmload._segments.eviction import evictable
from shmload._segments.layout import Layout
from shmload._segments.part import Awaited, acquire
from shmload._segments.upkeep import find_garbage
from shmload.errors import SegmentBusy

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts", "remembers")]


# One builds, the others wait ----------------------------------------------------------------------

LOAD = """
import os, signal, sys, shmload
os.environ["SHMLOAD_REMEMBER"] = "1"
from shmload._building import build, remembered
from shmload._settings import settings
settings.cache_clear()
finish = build.Build.run
def stop(self):
    print("BUILDS", flush=True)
    sys.stdin.readline()
    return finish(self)
build.Build.run = stop
shmload.load_pipeline(sys.argv[1], dtype="bfloat16", keep=True, progress=False)
print("DONE", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def waits(caplog):
    """Load in a thread; return the thread once it waits for another process, and its result."""
    caplog.set_level(logging.INFO, "shmload")
    found = []

    def start(source):
        thread = threading.Thread(target=lambda: found.append(load(str(source))))
        thread.start()
        while "another process builds it" not in caplog.text:
            thread.join(0.01)
            assert thread.is_alive()
        caplog.clear()
        return thread, found

    yield start
    found.clear()


def test_one_process_builds_and_the_others_wait(saved, built, child, waits, monkeypatch):
    wait, states = Awaited.wait, []
    monkeypatch.setattr(
        Awaited, "wait", lambda *given: states.append(gc.isenabled()) or wait(*given)
    )
    source = saved("stable-diffusion")
    builder = child(LOAD, source)
    builder.expect("BUILDS")
    thread, found = waits(source)
    builder.process.stdin.write(b"\n")
    builder.expect("DONE")
    thread.join(60)
    assert_equal(found[0], reference(str(source), BF16))
    assert built == []
    assert states == [True]  # the garbage collector is on


def test_killed_builder_leaves_nothing_and_another_builds(saved, built, child, waits, shm_names):
    source = saved("stable-diffusion")
    builder = child(LOAD, source)
    builder.expect("BUILDS")
    thread, found = waits(source)
    builder.process.send_signal(signal.SIGKILL)
    thread.join(60)
    assert_equal(found[0], reference(str(source), BF16))
    assert (len(built), kept()) == (1, ["whole"])
    assert not [name for name in shm_names() if name.endswith(".part")]


def test_waiting_has_a_deadline(saved, built, child, waits, configure):
    configure(wait_timeout_s=0.1)
    source = saved("stable-diffusion")
    builder = child(LOAD, source)
    builder.expect("BUILDS")
    thread, _ = waits(source)
    thread.join(60)
    assert len(built) == 1
    builder.process.stdin.write(b"\n")
    builder.expect("DONE")


@pytest.fixture
def load_within(saved, monkeypatch):
    """Load a source while another one is built."""

    def start(source):
        make, found = PipelineMaker.make, []

        def within(*given):
            if not found:
                found.append(None)  # this load makes a pipeline, too
                found[0] = load(source)
            return make(*given)

        with monkeypatch.context() as patch:
            patch.setattr(PipelineMaker, "make", within)
            load(saved("sdxl"))
        return found[0]

    return start


def test_a_load_within_a_build_waits_for_no_builder(saved, child, load_within):
    source = str(saved("stable-diffusion"))  # as the builder names it
    builder = child(LOAD, source)
    builder.expect("BUILDS")
    assert_equal(load_within(source), reference(source, BF16))
    builder.process.stdin.write(b"\n")
    builder.expect("DONE")


def test_a_load_within_a_build_is_remembered(saved, built, load_within):
    source = str(saved("stable-diffusion"))
    load_within(source)
    assert (len(built), kept()) == (2, ["whole"] * 2)
    assert_equal(load(source), reference(source, BF16))
    assert len(built) == 2


# What it needs ------------------------------------------------------------------------------------


def test_it_goes_with_its_model(saved):
    source = saved("stable-diffusion")
    pipe = load(source)
    assert len(shmload.segments()) == 5
    (model,) = shmload.models()
    assert model.dtype == "bfloat16"
    with pytest.raises(SegmentBusy):
        shmload.evict(source)
    assert kept() == ["whole"]
    del pipe
    gc.collect()
    shard, *_ = [info.name for info in shmload.segments() if not info.kept]
    assert sorted(bool(info.kept) for info in shmload.evict(shard)) == [False, True]
    shmload.evict(source)
    assert not shmload.segments()


def test_it_goes_with_what_was_idle_for_its_time(saved):
    source = saved("stable-diffusion")
    shmload.warm(source, dtype=BF16, keep_for="1h")
    pipe = load(source)
    names = [info.name for info in shmload.segments()]
    idle_for(2 * 3600)
    assert shmload.collect_garbage() == []
    assert kept() == ["whole"]
    del pipe
    gc.collect()
    idle_for(2 * 3600)
    assert sorted(find_garbage()) == sorted(names)
    assert sorted(shmload.collect_garbage()) == sorted(names)


def test_recall_removes_what_was_idle_for_its_time_but_uses_what_it_needs(saved, shards, built):
    source = saved("stable-diffusion")
    shmload.warm(source, dtype=BF16, keep_for="1h")
    load(source)
    gc.collect()
    wanted = {info.name for info in shmload.segments()}
    shmload.warm(shards[0], dtype=BF16, keep_for="1h")
    idle_for(2 * 3600)
    pipe = load(source)
    assert {info.name for info in shmload.segments()} == wanted
    assert len(built) == 1
    del pipe


def test_refusal_to_remove_what_it_needs_while_it_is_pinned_names_it(saved):
    load(saved("stable-diffusion"))
    gc.collect()
    (built,) = (info for info in shmload.segments() if info.kept)
    remedy = f"by what was built of it, {built.needs_as}; `shmload rm {built.needs_as}`"
    shmload.pin(built.name)
    with pytest.raises(shmload.SegmentBusy, match=remedy):
        shmload.evict(built.needs[0])


def test_idle_models_make_room_for_others(saved):
    load(saved("stable-diffusion"))
    gc.collect()
    going = evictable(shmload.segments())
    assert [bool(info.kept) for info in going] == [True] + 4 * [False]  # before what it needs


def test_of_changed_files_it_is_garbage(copied):
    source = copied("stable-diffusion")
    load(source)
    change_weights_at_the_same_time(source, None)
    assert not next(info for info in shmload.segments() if info.kept).is_current
    shmload.collect_garbage()
    assert kept() == []
    assert len(shmload.segments()) == 3  # of the files that are as they were


@pytest.mark.parametrize("can_be_kept", [True, False])
def test_without_room_the_load_goes_on(saved, monkeypatch, caplog, can_be_kept):
    def refuse(*_, **__):
        raise shmload.SharedMemoryFull("there is no room")

    source = saved("stable-diffusion")
    monkeypatch.setattr(StableDiffusionPipeline, "_load_connected_pipes", not can_be_kept)
    monkeypatch.setattr(keeping, "made_room", refuse)
    assert_equal(load(source), reference(source, BF16))
    assert kept() == []
    assert "each process builds it" in caplog.text


def test_finished_load_waits_for_no_room_to_keep_what_it_has_built(
    saved, configure, monkeypatch, caplog
):
    monkeypatch.setattr(room, "_QUIET_S", 0)
    source = saved("stable-diffusion")
    # Another load decodes, so that all is full until that ends.
    (other,) = shmload.plan(saved("flux"), components=["vae"], keep=True).shards
    needed = shmload.plan(source, dtype=BF16, keep=True).decode_nbytes
    configure(budget=needed + (1 << 20), wait_timeout_s=1)
    with contextlib.closing(acquire(other.segment)) as part:
        part.prepare(Layout(header=b"", pieces=(), nbytes=1 << 20))
        load(source)
    assert kept() == []
    assert len(shmload.segments()) == 4
    assert "each process builds it" in caplog.text
    assert "waiting" not in caplog.text


@pytest.mark.parametrize("damaged", ["the end", "the header", "the length"])
def test_damaged_record_is_built_anew(saved, built, damaged):
    source = saved("stable-diffusion")
    load(source)
    (name,) = (info.name for info in shmload.segments() if info.kept)
    path = Path("/dev/shm", name)
    content, noise = path.read_bytes(), os.urandom(100_000)
    path.chmod(0o600)
    path.write_bytes(
        {
            "the end": content[:-100_000] + noise,
            "the header": noise[:100] + content[100:],
            "the length": content[:10_000],
        }[damaged]
    )
    path.chmod(0o400)
    assert_equal(load(source), reference(source, BF16))
    assert len(built) == 2
