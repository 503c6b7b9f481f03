"""A place for templates and programs of the tests, and templates that end with them."""

import tempfile
from pathlib import Path

import pytest
from running_place import Running


@pytest.fixture(scope="module")
def running():
    place = Running(Path(tempfile.mkdtemp(prefix="run-", dir="/tmp")))
    yield place
    place.close()


@pytest.fixture
def start(running):
    """Start a program that prints `up`, wait for that, and return its caller."""
    callers = []

    def start(code="print('up', flush=True); input()"):
        callers.append(running.call("-c", code))
        assert callers[-1].stdout.readline() == "up\n", callers[-1].stderr.read()
        return callers[-1]

    yield start
    for caller in callers:
        caller.kill()
        caller.communicate()
