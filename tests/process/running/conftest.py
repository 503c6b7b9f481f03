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
