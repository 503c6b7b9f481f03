"""A worker can read a file that only its lender may open."""

import os

import pytest
from privileges import no_privileges

from shmload.workers.main import _reopen


def test_file_that_only_its_lender_may_open_is_read_all_the_same(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    fd = os.open(path, os.O_RDONLY)
    path.chmod(0)
    try:
        with no_privileges():
            with pytest.raises(PermissionError):
                path.open("rb")
            fd = _reopen(fd)
        assert os.pread(fd, 7, 0) == b"weights"
    finally:
        os.close(fd)
