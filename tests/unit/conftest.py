"""Fixtures of the unit tests."""

import os
import secrets

import pytest

from shmload._host.shm import shm_open
from shmload._segments.names import name_prefix


@pytest.fixture
def name(evicts):
    return f"{name_prefix()}{secrets.token_hex(15)}"


@pytest.fixture
def fd(name):
    """A shared memory object that this process has open for writing."""
    opened = shm_open(name, create=True, writable=True)
    yield opened
    os.close(opened)
