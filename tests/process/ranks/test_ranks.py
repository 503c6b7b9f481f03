"""Of the ranks that torchrun and accelerate start on one host one decodes, the others attach."""

import gc
import json
import signal
import threading
from pathlib import Path

import pytest
import torch
from accelerated import assert_as_on_the_host, load
from comparing import assert_equal, reference
from warming import CHILD, begun
from watching import until

import shmload
from shmload._loading import holdings
from shmload._segments import eviction

_SUPPORT = Path(__file__).parents[2] / "support"
_LAUNCHER = _SUPPORT / "forking_launcher.py"
# The ranks are forked, which spares their imports.
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "3")
_ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)

LOAD = """
import json, os, signal, sys
from pathlib import Path
source, out, tests = sys.argv[1:4]
sys.path.insert(0, tests)
import shmload
from shmload._loading.load import Load
read = []
close = Load.close
def note(load):
    read.append(load.read_nbytes)
    load.read_nbytes = 0  # it may be closed again
    close(load)
Load.close = note
pipe = shmload.load_pipeline(source, torch_dtype="bfloat16")
def tell(**rank):
    Path(out, os.environ["LOCAL_RANK"] + ".json").write_text(json.dumps(rank))
"""
# Checks its pipeline when all ranks have theirs.
EQUAL = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
from comparing import assert_equal, reference
from mappings import Mappings, copied_nbytes, state_of
tensors = state_of(pipe).values()
mappings = Mappings()
assert all(mappings.find(t)[1].startswith("/dev/shm/shmload-") for t in tensors)
copied = copied_nbytes(pipe)
assert_equal(pipe, reference(source, torch.bfloat16))
dist.barrier()  # all have touched all of it
pss = 0
for line in Path("/proc/self/smaps").read_text().splitlines():
    fields = line.split()
    if not fields[0].endswith(":"):
        is_segment = "/dev/shm/shmload-" in line
    elif is_segment and fields[0] == "Pss:":
        pss += int(fields[1]) * 1024
segments = [[info.name, info.nbytes, info.is_shared] for info in shmload.segments()]
tell(read=sum(read), copied=copied, pss=pss, segments=segments)
dist.barrier()  # no rank ends before the others
dist.destroy_process_group()
"""
# One of two ranks is killed after its load; the launcher then restarts both.
RESTARTED = """
print("rank", os.environ["LOCAL_RANK"], "read", read, shmload.segments(), file=sys.stderr)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
tell(read=sum(read))
"""


@pytest.fixture
def launch(tmp_path, warm_python, monkeypatch):
    """Run a script with a launcher; return the notes of its ranks."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    path, out = tmp_path / "rank.py", tmp_path / "out"
    out.mkdir()

    def run(launcher, script, source):
        path.write_text(LOAD + script)
        ended = warm_python.run(_LAUNCHER, *launcher, path, source, out, _SUPPORT)
        print(ended.stderr)  # where a test fails, pytest shows it
        assert ended.returncode == 0
        return [json.loads(path.read_text()) for path in sorted(out.iterdir())]

    return run


@pytest.mark.slow
@pytest.mark.libraries
@pytest.mark.parametrize(
    ("launcher", "size"),
    [(_TORCHRUN, 3), (_ACCELERATE, 2)],
    ids=["torchrun", "accelerate"],
)
def test_source_is_read_once_for_all_ranks(saved, launch, shm_names, launcher, size):
    source = saved("stable-diffusion")
    planned = shmload.plan(source, torch_dtype="bfloat16").shards
    nbytes = sum(shard.read_nbytes for shard in planned)
    found = launch(launcher, EQUAL, source)
    assert len(found) == size
    assert sum(rank["read"] for rank in found) == nbytes
    assert [rank["copied"] for rank in found] == [0] * size
    for rank in found:
        assert rank["segments"] == found[0]["segments"]
    names, sizes, shared = zip(*found[0]["segments"], strict=True)
    assert sorted(names) == sorted(shard.segment for shard in planned)
    assert all(shared)
    # One copy for all ranks; each has some private pages, such as the last page of a file.
    assert sum(rank["pss"] for rank in found) <= 1.05 * sum(sizes) + 4096 * len(sizes)
    assert shm_names() == []


@pytest.mark.slow
def test_restarted_ranks_read_nothing(saved, launch, shm_names):
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1")
    launcher = ("torch.distributed.run", "--standalone", *options)
    assert launch(launcher, RESTARTED, saved("stable-diffusion")) == [{"read": 0}] * 2
    assert shm_names() == []


# Deaths -------------------------------------------------------------------------------------------


@pytest.fixture
def start_rank(child, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    def start(source, role):
        rank = child(CHILD, role, source)
        rank.begun = begun(rank)
        if role == "stops":
            rank.expect("AT")
        return rank

    return start


def test_ranks_take_over_from_one_that_is_killed(saved, start_rank, shm_names):
    source = saved("flux")
    first = start_rank(source, "stops")
    assert "4 shards to decode" in first.begun
    others = [start_rank(source, "waits") for _ in range(2)]
    assert all("4 awaited" in rank.begun for rank in others)
    first.end()
    for rank in others:
        rank.expect("LOADED")
    names = shm_names()
    segments = {info.name for info in shmload.verify()}
    assert len(segments) == 4
    assert len(set(names) - segments) <= 1  # the view of the killed rank, if it had begun to build
    for rank in others:
        rank.end()  # kill all ranks
    assert shm_names() == names
    assert sorted(shmload.collect_garbage()) == names
    assert shm_names() == []


def test_ranks_wait_for_one_that_is_stopped_until_a_deadline(
    saved, start_rank, configure, shm_names
):
    source = saved("flux")
    first = start_rank(source, "stops")
    first.process.send_signal(signal.SIGSTOP)
    configure(wait_timeout_s=0.5)
    second = start_rank(source, "waits")
    assert second.expect("REFUSED").startswith("SegmentTimeout ")
    assert second.wait() == 0
    first.end()
    removed = shmload.collect_garbage()  # perhaps with the view in which it had begun to build
    assert len([name for name in removed if name.endswith(".part")]) == 4
    assert shm_names() == []


# One rank alone -----------------------------------------------------------------------------------


@pytest.fixture
def rank(monkeypatch):
    """Make this process one of two ranks; `rank()` lets the other come and ends the wait for it."""
    others = set()
    holders = holdings.holders
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(holdings, "_FAREWELL_S", 0)
    monkeypatch.setattr(
        holdings, "holders", lambda names: {n: pids | others for n, pids in holders(names).items()}
    )

    def come():
        others.add(1)
        for thread in threading.enumerate():
            if thread.name == "shmload-linger":
                thread.join(20)

    yield come
    come()


@pytest.mark.libraries
def test_segments_of_a_dropped_pipeline_stay_until_all_have_come(saved, rank, shm_names):
    source = saved("flux")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    names = shm_names()
    del pipe
    gc.collect()
    assert shm_names() == names != []
    read = []
    again = shmload.load_pipeline(
        source, torch_dtype=torch.bfloat16, progress=lambda *counts: read.append(counts)
    )
    assert read == []
    assert_equal(again, reference(source, torch.bfloat16))
    rank()
    assert shm_names() == names
    del again
    gc.collect()
    assert shm_names() == []


def test_segments_do_not_wait_for_ever_for_a_rank(saved, rank, shm_names, monkeypatch):
    monkeypatch.setattr(holdings, "_PATIENCE_S", 0)
    shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16)
    gc.collect()
    until(lambda: shm_names() == [])


def test_share_is_not_chosen_where_the_caller_has_chosen(saved, rank, shm_names, evicts):
    pipe = shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16, share=False)
    assert shm_names() == []
    del pipe
    shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16, keep=True)
    assert not any(info.is_shared for info in shmload.segments())


# Accelerators -------------------------------------------------------------------------------------


@pytest.mark.libraries
def test_ranks_with_accelerators_share_instead_of_reading_each(
    saved, rank, accelerators, streams, little_ahead, shm_names
):
    source = saved("flux")
    got = load(source)
    assert streams == []
    assert len(shm_names()) == 4  # kept although all tensors are on the device
    read = []
    again = load(source, progress=lambda *counts: read.append(counts))
    assert read == []
    assert shm_names()
    rank()
    assert shm_names() == []
    for pipe in (got, again):
        assert_as_on_the_host(pipe, reference(source, torch.bfloat16))


def test_ranks_without_room_to_share_read_each(
    saved, rank, accelerators, streams, little_ahead, shm_names, monkeypatch, caplog
):
    monkeypatch.setattr(eviction, "shm_free_nbytes", lambda: 0)
    source = saved("flux")
    got = load(source)
    assert streams
    assert "no room to share" in caplog.text
    assert shm_names() == []
    assert_as_on_the_host(got, reference(source, torch.bfloat16))
    for kwargs in ({"share": True}, {"device_map": None}, {"verify": True}):
        with pytest.raises(shmload.SharedMemoryFull):
            load(source, **kwargs)
