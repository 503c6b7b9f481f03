"""After a kill of a job that stores results, the next job continues where it was."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from storing import COUNT, content_of, done_in, run

import shmload
from shmload._results.names import FORMATS

pytestmark = pytest.mark.slow

START = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from storing import *
folder = Path(sys.argv[2])
"""
JOB = """
def die():
    os.kill(os.getpid(), signal.SIGKILL)
with pytest.MonkeyPatch.context() as patch:
    Mortality(patch, int(sys.argv[3]), 25, die)
    run(folder, range(10), format=sys.argv[4])
"""
STORE = """
results = ResultFolder(folder, shard_items=SHARD_ITEMS, facts=FACTS)
results.add(0, key_of(0), arrays_of(0))
print("STORED", flush=True)
input()
"""
FORK = """
pid = os.fork()
if pid == 0:
    try:
        results.add(1, key_of(1), arrays_of(1))
    except Exception as exc:
        print("CHILD", os.getpid(), type(exc).__name__, flush=True)
input()
"""
SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "results"


@pytest.mark.parametrize("format", FORMATS)
def test_job_killed_again_and_again_gives_the_same_bytes(child, tmp_path, folder, format):
    run(tmp_path / "serial", range(COUNT), format=format)
    left = []
    # In the first record, in a later one, before a shard's name, before its journal's removal.
    for at in (9, 9, 10, 18):
        job = child(START + JOB, SUPPORT, folder, at, format)
        assert job.wait() == -signal.SIGKILL, job.errors
        left.append({path.name for path in folder.iterdir()})
    assert not any(name.endswith(".tmp") for names in left for name in names)
    assert {f"shard-00001{FORMATS[format].suffix}", "shard-00001.journal"} < left[3]
    run(folder, range(COUNT), format=format)
    assert content_of(folder) == content_of(tmp_path / "serial")


def test_folder_is_free_and_nothing_lost_once_its_job_is_killed(child, folder):
    job = child(START + STORE, SUPPORT, folder)
    job.expect("STORED")
    with pytest.raises(shmload.ResultsBusy, match=f"process {job.pid}"):
        run(folder, range(COUNT))
    job.process.kill()
    job.wait()
    assert done_in(folder) == [0]


def test_forked_child_neither_writes_nor_keeps_the_lock(child, folder):
    job = child(START + STORE + FORK, SUPPORT, folder)
    job.expect("STORED")
    job.say()
    pid, error = job.expect("CHILD").split()
    try:
        assert error == "ArgumentError"
        job.process.kill()
        job.wait()
        assert done_in(folder) == [0]
        os.kill(int(pid), 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_storing_imports_no_torch(new_child):
    storing = new_child(
        "import sys, shmload.integrations.results\n"
        "print('HEAVY', {'torch', 'pyarrow', 'webdataset'} & sys.modules.keys())"
    )
    assert storing.expect("HEAVY") == "set()"
    assert storing.wait() == 0
