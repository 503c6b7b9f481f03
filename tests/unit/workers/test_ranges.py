"""A worker fetches the ranges that a piece needs, in the order in which they are needed."""

import contextlib
from concurrent.futures import Future

import pytest

from shmload._checkpoints import objects
from shmload._checkpoints.remote import RemoteObject
from shmload._segments.pieces import Run
from shmload.workers.reader import RANGE_NBYTES, Reader, is_one_range, join

MB = 1 << 20


def span(offset, nbytes):
    """Return a run of bytes that stay as they are."""
    return Run(offset, 0, nbytes, "U8", "U8")


def whole(begin, nbytes):
    """Return spans of 1 MiB."""
    return [span(at, min(MB, begin + nbytes - at)) for at in range(begin, begin + nbytes, MB)]


def ends(runs):
    return runs[0].source_offset, runs[-1].source_end


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([], []),
        ([span(8, 100)], [(8, 108)]),
        (whole(0, 20 * MB), [(0, 8 * MB), (8 * MB, 16 * MB), (16 * MB, 20 * MB)]),
        ([span(0, 100), span(100, 50)], [(0, 150)]),
        ([span(0, 100), span(1000, 50)], [(0, 1050)]),  # a small gap is read, too
        ([span(0, 100), span(MB, 50)], [(0, 100), (MB, MB + 50)]),
        ([span(1000, 100), span(0, 50)], [(1000, 1100), (0, 50)]),
    ],
)
def test_spans_are_joined(spans, wanted):
    found = list(join(spans, is_one_range))
    assert list(map(ends, found)) == wanted
    assert [run for each in found for run in each] == spans
    assert all(end - begin <= RANGE_NBYTES for begin, end in map(ends, found))


def test_range_that_arrives_as_a_wait_ends_is_read(monkeypatch):
    result = Future.result

    def be_late(future, timeout=None):
        content = result(future)
        if timeout is not None:
            raise TimeoutError
        return content

    monkeypatch.setattr(Future, "result", be_late)
    monkeypatch.setattr(objects, "fetch", lambda _, begin, end: bytes(range(begin, end)))
    shard = RemoteObject(url="https://host/file", nbytes=9, tag="")
    with contextlib.closing(Reader()) as reader:
        assert list(map(bytes, reader.read(shard, [span(2, 3)]))) == [b"\2\3\4"]
