"""Programs that have the stand-in device."""

from pathlib import Path

import pytest
import stand_in

from shmload._host.shm import shm_unlink

_PROGRAM = """
import sys, torch
torch.set_num_threads(1)  # or forks would wait for threads that they do not have
sys.path.append(sys.argv[2])
import offloading as o
"""


@pytest.fixture
def offloading(child, shm_names):
    """A function that runs a program with the module `o` to its end, over a source."""
    stand_in.build()

    def run(source, code):
        support = Path(stand_in.__file__).parents[1]
        started = child(f"{_PROGRAM}{code}\nprint('END', flush=True)", source, support)
        started.expect("END")

    yield run
    for name in shm_names():
        shm_unlink(name)
