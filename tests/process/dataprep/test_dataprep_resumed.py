"""A job that was killed, interrupted or failed goes on where it was, and its bytes are the same."""

import os
import signal
import sys

import cloudpickle
import pytest
from light_jobs import write_server
from stored_jobs import COUNT, assert_clean, squares, stored_in

import shmload
from shmload.integrations.results import Results

# Pickle this module's functions by value, so that a job's processes do not import all of the above.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


JOB = """
import os, signal, sys
import numpy as np
from shmload.integrations import dataprep
from shmload._jobs import job
source, python, folder, log, kill_at = sys.argv[1:]
sys.executable = python
def work(pipe, item):
    with open(log, "a") as file:
        file.write(f"{item}\\n")
    return {"square": np.arange(item) ** 2}
add = job.ResultFolder.add
def add_and_die(results, *args):
    add(results, *args)
    if results._added == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
job.ResultFolder.add = add_and_die
made = dataprep.write(work, range(30), folder, source=source, procs=2, shard_items=8)
print("ADDED", made.added, flush=True)
"""


@pytest.mark.slow
def test_killed_job_goes_on_and_does_nothing_twice(
    light_server, pipeline, child, tmp_path, folder, log
):
    python, stored = write_server(tmp_path / "server"), set()
    for kill_at in (3, 9, 0):
        job = child(JOB, pipeline, python, folder, log.path, kill_at)
        if not kill_at:
            assert job.expect("ADDED") == str(COUNT - len(stored))
        assert job.wait() == (-signal.SIGKILL if kill_at else 0), job.errors
        called, before, stored = log.take(), stored, stored_in(folder, pipeline)
        assert len(called) == len(set(called))
        assert before.isdisjoint(called)
        assert stored - before <= set(called)
        assert len(stored) == len(before) + (kill_at or COUNT - len(before))
        # Four items per process: at work, queued, and the results of the two before them.
        assert len(called) - (len(stored) - len(before)) <= 4 * 2
    assert len(stored) == COUNT
    light_server()
    assert_clean(folder, pipeline, tmp_path)


def test_killed_process_loses_what_it_had_and_no_more(
    light_job, pipeline, tmp_path, folder, log, caplog
):
    def work(pipe, item):
        log.note(item)
        if item == 12 and not (tmp_path / "mark").exists():
            (tmp_path / "mark").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return squares(pipe, item)

    light_job().write(work, range(COUNT), folder, shard_items=8)
    called = log.take()
    again = [item for item in range(COUNT) if called.count(item) > 1]
    assert again == [12]
    assert len(called) == COUNT + 1
    assert_clean(folder, pipeline, tmp_path)


def test_interrupted_job_keeps_what_it_has_stored(light_job, pipeline, tmp_path, folder, log):
    def items():
        for item in range(COUNT):
            if item == 20:
                signal.raise_signal(signal.SIGINT)
            yield item

    def work(pipe, item):
        log.note(item)
        return squares(pipe, item)

    job = light_job()
    with pytest.raises(KeyboardInterrupt):
        job.write(work, items(), folder, shard_items=8)
    stored = stored_in(folder, pipeline)
    assert stored
    assert stored <= set(log.take())
    job.write(work, range(COUNT), folder, shard_items=8)
    assert log.take() == sorted(set(range(COUNT)) - stored)
    assert_clean(folder, pipeline, tmp_path)


def failing_until(mark, log):
    def work(pipe, item):
        log.note(item)
        if item == 12 and not mark.exists():
            raise LookupError("twelve is not there")
        return squares(pipe, item)

    return work


@pytest.mark.slow
def test_error_stops_the_job_and_the_next_goes_on(light_job, pipeline, tmp_path, folder, log):
    work = failing_until(tmp_path / "mark", log)
    job = light_job()
    with pytest.raises(shmload.ItemFailed, match="item 12, 12: LookupError: twelve is not there"):
        job.write(work, range(COUNT), folder, shard_items=8)
    stored = stored_in(folder, pipeline)
    assert 12 not in stored
    assert not (folder / "index.jsonl").exists()
    log.take()
    (tmp_path / "mark").touch()
    made = job.write(work, range(COUNT), folder, shard_items=8)
    assert log.take() == sorted(set(range(COUNT)) - stored)
    assert made.added == COUNT - len(stored)
    assert_clean(folder, pipeline, tmp_path)


def test_error_that_is_passed_over_stands_in_the_index(light_job, pipeline, tmp_path, folder, log):
    work = failing_until(tmp_path / "mark", log)
    job = light_job()
    made = job.write(work, range(COUNT), folder, shard_items=8, errors="pass")
    assert (made.items, made.added, made.failed) == (COUNT, COUNT - 1, 1)
    assert Results(folder).errors == {"00000012": "LookupError: twelve is not there"}
    log.take()
    (tmp_path / "mark").touch()
    made = job.write(work, range(COUNT), folder, shard_items=8, errors="pass")
    assert (log.take(), made.failed, made.failed_before) == ([], 1, 1)
    made = job.write(work, range(COUNT), folder, shard_items=8, errors="pass", retry_failed=True)
    assert log.take() == [12]
    assert (made.added, made.failed) == (1, 0)
    assert_clean(folder, pipeline, tmp_path)


def test_more_items_may_come_later(light_job, pipeline, tmp_path, folder, log):
    def work(pipe, item):
        log.note(item)
        return squares(pipe, item)

    job = light_job()
    job.write(work, range(10), folder, shard_items=8)
    log.take()
    made = job.write(work, range(COUNT), folder, shard_items=8)
    assert (made.items, made.added) == (COUNT, COUNT - 10)
    assert log.take() == list(range(10, COUNT))
    assert_clean(folder, pipeline, tmp_path)
