"""If a job's processes die or hang, no item is lost or computed twice and nothing is left."""

import gc
import os
import signal

import pytest
from light_jobs import wait_until_ended

import shmload
from shmload.integrations import dataprep

pytestmark = pytest.mark.slow


@pytest.fixture
def source(saved):
    return saved("stable-diffusion")


@pytest.fixture
def job(light_job):
    return light_job()


def test_job_of_a_rank_starts_no_thread_that_could_not_be_forked(source, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with dataprep.Job(source, components=["vae"], torch_dtype="bfloat16", procs=1) as job:
        assert list(job.map(lambda pipe, item: os.environ["LOCAL_WORLD_SIZE"], [0])) == ["2"]


# Abandoned maps -----------------------------------------------------------------------------------


def test_map_that_was_left_does_not_disturb_the_next(job):
    results = job.map(lambda pipe, item: item, range(1000))
    assert next(results) == 0
    results.close()
    assert list(job.map(lambda pipe, item: -item, range(5))) == [0, -1, -2, -3, -4]


def test_items_are_taken_as_they_are_needed(job):
    taken = []
    results = job.map(lambda pipe, item: item, (taken.append(n) or n for n in range(1000)))
    assert next(results) == 0
    assert len(taken) <= 2 * 16
    results.close()


def test_map_after_one_that_failed_is_not_disturbed(job):
    def fail_at_once(pipe, item):
        if item == 0:
            raise LookupError("nothing there")
        return item

    with pytest.raises(shmload.ItemFailed) as caught:
        list(job.map(fail_at_once, range(100)))
    assert caught.value.index == 0  # the error keeps its traceback's frames alive
    assert list(job.map(lambda pipe, item: -item, range(5))) == [0, -1, -2, -3, -4]


def test_second_map_at_once_is_refused(job):
    results = job.map(lambda pipe, item: item, range(100))
    next(results)
    with pytest.raises(shmload.ArgumentError, match="at another map"):
        next(job.map(lambda pipe, item: item, [1]))
    results.close()


# Processes that end -------------------------------------------------------------------------------


def die_once(pipe, item):
    """Kill this process at the first attempt of an item."""
    mark, number, how = item
    if number == 5 and not mark.exists():
        mark.touch()
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    return number, os.getpid()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
def test_killed_process_is_replaced_and_its_items_are_done(job, tmp_path, how):
    items = [(tmp_path / "mark", number, how) for number in range(12)]
    found = list(job.map(die_once, items))
    assert [number for number, _ in found] == list(range(12))
    assert len({pid for _, pid in found}) in (2, 3)
    assert (tmp_path / "mark").exists()


def test_item_that_kills_three_processes_is_passed_over(job):
    def deadly(pipe, item):
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    got = list(job.map(deadly, range(6)))
    assert got[:2] + got[3:] == [0, 1, 3, 4, 5]
    assert isinstance(got[2], shmload.ItemKilled)
    assert (got[2].item, got[2].endings) == (2, ("SIGKILL",) * 3)


def test_process_that_hangs_is_killed(light_job, monkeypatch):
    def hang(pipe, item):
        while item == 1:
            signal.pause()
        return item

    monkeypatch.setattr("shmload._jobs.maps._POLL_S", 0.05)
    got = list(light_job(item_timeout_s=0.2).map(hang, range(3)))
    assert (got[0], got[2]) == (0, 2)
    assert got[1].endings == ("no result within 0.2 s",) * 3


def test_processes_and_fork_server_with_a_pipeline_are_replaced(source, tmp_path):
    def kill_once(pipe, item):
        victims = {4: os.getpid(), 8: os.getppid()}
        if item in victims and not (tmp_path / str(item)).exists():
            (tmp_path / str(item)).touch()
            os.kill(victims[item], signal.SIGKILL)
            signal.pause()
        return item, str(pipe.vae.dtype)

    with dataprep.Job(source, components=["vae"], torch_dtype="bfloat16", procs=2) as job:
        found = list(job.map(kill_once, range(12)))
    assert found == [(item, "torch.bfloat16") for item in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["4", "8"]


def test_nothing_is_left_of_a_job_without_processes(source, shm_names):
    options = {"components": ["vae"], "torch_dtype": "bfloat16", "procs": 0}
    job = dataprep.Job(source, **options)
    assert list(job.map(lambda pipe, item: item, range(3))) == [0, 1, 2]
    with pytest.raises(shmload.ItemFailed, match="SystemExit: 3"):
        list(job.map(lambda pipe, item: exit(3), [0]))
    results = job.map(lambda pipe, item: item, range(3))
    next(results)
    assert shm_names()
    results.close()
    job.close()
    with pytest.raises(shmload.ArgumentError, match="closed"):
        list(job.map(lambda pipe, item: item, [0]))
    gc.collect()  # the error's frames refer to the pipeline
    assert shm_names() == []


JOB = """
import os, sys
from shmload.integrations import dataprep
job = dataprep.Job(sys.argv[1], components=["vae"], torch_dtype="bfloat16", procs=2)
pids = set()
for parent, pid in job.map(lambda pipe, item: (os.getppid(), os.getpid()), range(8)):
    pids |= {parent, pid}
print("PIDS", *pids, flush=True)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("FORKED", flush=True)
sys.stdin.readline()
"""


def test_killed_job_leaves_no_process_and_no_memory(source, child, shm_names):
    owner = child(JOB, source)
    pids = [int(pid) for pid in owner.expect("PIDS").split()]
    assert len(pids) >= 2
    assert shm_names()
    owner.expect("FORKED")  # a child that inherited all its sockets
    owner.process.kill()
    owner.wait()
    wait_until_ended(*pids)
    assert shm_names() == []
