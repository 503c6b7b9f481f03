"""Fixtures of the tests of jobs that store their results."""

import pytest
from stored_jobs import Log


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")
