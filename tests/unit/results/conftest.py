"""A quick disk, for all tests of results."""

import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_disk():
    """Skip `fsync`: it takes 10 ms, and its effect cannot be seen here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield
