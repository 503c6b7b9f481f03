"""What tests of stored jobs share: a log of calls, a function, and folders to compare with."""

import sys

import cloudpickle
import numpy as np
from storing import content_of

import shmload
from shmload.integrations import dataprep
from shmload.integrations.results import ResultFolder

# Pickle this module's functions by value, so that a job's processes do not import all of the above.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNT = 30


class Log:
    """Records the items for which the function was called, in any process."""

    def __init__(self, path):
        self.path = path
        path.touch()

    def note(self, item):
        with self.path.open("a") as file:
            file.write(f"{item}\n")

    def take(self):
        """Return the items since the last call of this, in order."""
        found = sorted(int(line) for line in self.path.read_text().split())
        self.path.write_text("")
        return found


def squares(pipe, item):
    return {"square": np.arange(item) ** 2}


def stored_in(folder, source):
    """Return the items that a folder has."""
    facts = shmload.Handle.of(source).facts | {"seed": "0", "threads": "1", "devices": "cpu"}
    with ResultFolder(folder, shard_items=8, facts=facts) as results:
        return {index for index in range(COUNT) if results.is_done(index, f"{index:08}")}


def assert_clean(folder, source, tmp_path):
    """Check that a folder has the bytes of an undisturbed job."""
    with dataprep.Job(source, procs=2) as job:
        job.write(squares, range(COUNT), tmp_path / "clean", shard_items=8)
    assert content_of(folder) == content_of(tmp_path / "clean")
