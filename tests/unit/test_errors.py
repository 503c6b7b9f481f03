"""Errors keep their message and attributes when they cross to another process."""

import copy
import pickle
import traceback
from pathlib import Path

import pytest

import shmload
from shmload import errors

ERRORS = [
    shmload.ItemFailed("item 3 failed", index=3, endings=("SIGKILL",)),
    shmload.ArgumentError("it cannot be copied to", device="npu:0", lacks="torch.npu"),
    shmload.LibraryError("it is not installed"),
    shmload.SourceNotFound("no such file"),
    shmload.ShardTruncated("it is cut", path=Path("a.safetensors"), wanted=8, got=4),
    shmload.ShardUnreadable("it cannot be read", path="a.safetensors", errno=5),
    shmload.SharedMemoryFull("no room", needed=3, available=2, limit="/dev/shm", errno=28),
    shmload.DoesNotFit("too large", needed=3, limit="cuda:0", device_map={"": "cpu"}),
    shmload.ResultsError("it cannot be written", folder="there", errno=28),
    shmload.SegmentNotFound("several fit", candidates=("flux-dev", "flux-schnell")),
    shmload.SegmentBusy("in use", names=("shmload-0-ab",), removed=()),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "cross", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_error_that_crosses_is_the_same(error, cross):
    error.add_note("what a worker said")
    try:
        crossed = cross(error)
    finally:
        del error.__notes__
    assert type(crossed) is type(error)
    assert str(crossed) == str(error)
    assert getattr(crossed, "errno", None) == getattr(error, "errno", None)
    assert vars(crossed) == vars(error) | {"__notes__": ["what a worker said"]}


_HOSTILE = "a\x1b[31m\x9b2J\r\nshmload: all is well\u202e\udce9"


@pytest.mark.parametrize("name", errors.__all__)
def test_no_error_lets_a_name_steer_a_terminal(name):
    kind = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = (f"{_HOSTILE} cannot be read",)
    for text in (str(error), f"{error}", "".join(traceback.format_exception_only(error))):
        assert text.removesuffix("\n").isprintable()
        assert r"a\x1b[31m\x9b2J\r\nshmload: all is well\u202e\udce9 cannot be read" in text
