"""Jobs that start fast: the fork server is real, the pipeline is None, no process imports torch.

For tests of processes, messages and items, not of weights.
"""

import json
import os
import select
import sys
from pathlib import Path
from textwrap import dedent

import cloudpickle
import numpy as np
import pytest
from safetensors.numpy import save_file

from shmload.integrations import dataprep

# Pickle this module's functions by value, so that a job's processes do not import all of the above.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_SERVER = """#!{python}
import contextlib, os, select, signal, socket, sys, time, types
def is_first(name="first"):
    try:
        os.close(os.open({folder!r} + "/" + name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
def note(word):
    with open({folder!r} + "/notes", "a") as file:
        file.write(word + "\\n")
note("start")
{early}
from shmload.integrations.handles import Handle
from shmload._ipc.frames import Inbox, send, take_channel
from shmload._jobs import forkserver, messages
from shmload._jobs.messages import *
from shmload._jobs.payload import dump, load
Handle.load = lambda handle: None
def run(channel_fd, fork, setup):
    channel = take_channel(channel_fd)
    send(channel, Started())
    inbox = Inbox(channel, messages.MAX_FRAME_NBYTES)
    while True:
        while (frame := inbox.next_frame()) is not None:
            match messages.decode_to_runner(frame):
                case Begin(function):
                    call = load(function)
                case Work(index, item):
                    try:
                        answer = Answer(index, dump(call(None, load(item))))
                    except Exception as exc:
                        answer = Answer(index, dump(exc), "no traceback")
                    send(channel, answer)
        if not inbox.receive():
            return
runner = sys.modules["shmload._jobs.runner"] = types.ModuleType("runner")
runner.run = lambda *args: run(*args)
{code}
forkserver.main()
"""


def write_server(folder: Path, code: str = "", early: str = "") -> Path:
    """Write a program that can stand in for `sys.executable` when a job starts.

    Args:
        folder: an own folder of the program; its notes are written there.
        code: runs before it serves; may replace `run`, the main function of a runner.
        early: runs before everything else.
    """
    folder.mkdir()
    program = folder / "python"
    program.write_text(
        _SERVER.format(
            python=sys.executable, folder=str(folder), code=dedent(code), early=dedent(early)
        )
    )
    program.chmod(0o755)
    return program


def write_pipeline(folder: Path) -> Path:
    """Write the least pipeline that a job without components needs."""
    (folder / "unet").mkdir(parents=True)
    save_file({"a": np.zeros(3)}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "P", "unet": ["nowhere", "Unknown"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def pipeline(tmp_path):
    return write_pipeline(tmp_path / "pipeline")


@pytest.fixture
def light_server(monkeypatch, tmp_path):
    """Make the jobs of this test start fast: `program = light_server(code="", early="")`.

    The program is now `sys.executable`; pass it to `notes`.
    """
    made = []

    def make(code="", early=""):
        made.append(write_server(tmp_path / f"server-{len(made)}", code, early))
        monkeypatch.setattr(sys, "executable", str(made[-1]))
        return made[-1]

    return make


@pytest.fixture
def light_job(light_server, pipeline):
    """Make jobs that start fast: `light_job(code="", early="", **arguments_of_Job)`.

    Pass their `program` to `notes`.
    """
    made = []

    def make(code="", early="", **arguments):
        program = light_server(code, early)
        job = dataprep.Job(pipeline, **{"procs": 2} | arguments)
        job.program = program
        made.append(job)
        return job

    yield make
    for job in made:
        job.close()


def notes(program: Path) -> list[str]:
    """Return the notes of a program of `write_server`: `start` for each start, and its own."""
    path = program.parent / "notes"
    return path.read_text().splitlines() if path.exists() else []


def wait_readable(*channels, timeout_s=20):
    """Wait until every socket or pidfd has something to read."""
    for channel in channels:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"nothing came from {channel}"


def wait_until_ended(*pids):
    """Wait until processes have ended that need not be children of this one."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            wait_readable(fd)
        finally:
            os.close(fd)


def same(pipe, item):
    return item


def pid_of(pipe, item):
    return os.getpid()


def pids_of(job):
    """Return the processes that work for a job."""
    pids = set()
    count = len(job._crew.devices)
    while len(pids) < count:
        pids.update(job.map(pid_of, range(2 * count)))
    return pids
