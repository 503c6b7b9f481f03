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
    shmload.UnknownComponent("there is none", name="vea"),
    shmload.LibraryError("it is not installed"),
    shmload.SourceNotFound("no such file"),
    shmload.ShardTruncated("it is cut", path=Path("a.safetensors"), wanted=8, got=4),
    shmload.ShardUnreadable("it cannot be read", path="a.safetensors", errno=5),
    shmload.SharedMemoryFull(3, 2, "/dev/shm", "free some"),
    shmload.ProcessLimitExceeded("a.safetensors", "too many", "`ulimit`", "RLIMIT_NOFILE", 9, 24),
    shmload.DoesNotFit(3, 2, "cuda:0", "too much", "use", {"": "cpu"}),
    shmload.WorkerError("no progress", path="a.safetensors"),
    shmload.ResultsError("it cannot be written", folder="there", errno=28),
    shmload.SegmentNotFound("shmload-0-ab", ["shmload-0-cd"]),
    shmload.AmbiguousName("flux", ["flux-dev", "flux-schnell"]),
    shmload.SegmentBusy({"shmload-0-ab": [7]}, ["shmload-0-cd"]),
    shmload.SegmentTimeout("shmload-0-ab", 600.0),
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
