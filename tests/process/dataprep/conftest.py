"""Jobs without a pipeline, which start in 0.2 s; what ends a process, a program and a folder."""

import hashlib
import os
from multiprocessing import resource_tracker

import pytest

from shmload.integrations import dataprep

# The standard library starts it with the first fork server, for the rest of this process.
resource_tracker.ensure_running()


@pytest.fixture
def job():
    """Make jobs without a pipeline: `job(**arguments_of_Job)`."""
    made = []

    def make(**arguments):
        made.append(dataprep.Job(None, **{"procs": 2} | arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def digest_of():
    """Digest the names and bytes of all files of a folder."""

    def digest(folder):
        found = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
        return found.hexdigest()

    return digest


@pytest.fixture
def first_time(tmp_path):
    """A function for items: tells whether it is called with a name for the first time."""
    place = str(tmp_path)

    def is_first(name):
        try:
            os.close(os.open(f"{place}/first-{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    return is_first
