"""What a worker reads is what the file holds, however it is read."""

import contextlib
import errno
import itertools
import os
import random
import time

import pytest

from shmload._host.reading import READ_NBYTES, Reading, open_direct
from shmload._segments.pieces import Run
from shmload.workers.messages import Reason
from shmload.workers.reader import FillError, Reader

_NBYTES = 5 * READ_NBYTES + 1234
_AHEAD = 3


@pytest.fixture(scope="module")
def content():
    return os.urandom(_NBYTES)


@pytest.fixture(scope="module")
def path(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("reader") / "shard"
    path.write_bytes(content)
    return path


@pytest.fixture(params=["when needed", "ahead", "past the page cache"])
def source(request, path):
    fd = os.open(path, os.O_RDONLY)
    direct = open_direct(fd) if request.param == "past the page cache" else None
    if request.param == "past the page cache" and direct is None:
        pytest.skip("this file system has no O_DIRECT")
    found = Reading(fd, 0 if request.param == "when needed" else _AHEAD, direct, direct is not None)
    yield found
    found.close()
    os.close(fd)


@pytest.fixture
def reader():
    with contextlib.closing(Reader()) as reader:
        yield reader


def span(offset, nbytes):
    """Return a run of bytes that stay as they are."""
    return Run(offset, 0, nbytes, "U8", "U8")


def _random_spans(chance):
    spans = []
    for _ in range(chance.randrange(12)):
        offset = chance.randrange(_NBYTES)
        nbytes = chance.choice([1, 8, 4096, 5000, READ_NBYTES - 1, READ_NBYTES])
        spans.append(span(offset, min(nbytes, _NBYTES - offset)))
    return sorted(spans, key=lambda run: run.source_offset) if chance.random() < 0.5 else spans


@pytest.mark.parametrize("seed", range(40))
def test_every_span_has_its_bytes(source, reader, content, seed):
    spans = _random_spans(random.Random(seed))
    views = reader.read(source, spans)
    for run, view in zip(spans, views, strict=True):
        assert view == content[run.source_offset : run.source_offset + run.source_nbytes]


def test_end_of_the_file_is_named(source, reader):
    spans = [span(0, 10), span(_NBYTES - 10, 20), span(_NBYTES + READ_NBYTES, 10)]
    with pytest.raises(FillError) as caught:
        for _ in reader.read(source, spans):
            pass
    assert caught.value.reason is Reason.TRUNCATED
    assert caught.value.offset == _NBYTES


def test_error_of_the_kernel_is_named_and_ends_the_reads(source, reader, content, monkeypatch):
    preadv = os.preadv

    def fail(fd, buffers, offset, *flags):
        if offset >= 2 * READ_NBYTES:
            raise OSError(errno.EIO, "bad sector")
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fail)
    spans = [span(number * READ_NBYTES, READ_NBYTES) for number in range(5)]
    with pytest.raises(FillError, match=os.strerror(errno.EIO)) as caught:
        for _ in reader.read(source, spans):
            pass
    assert caught.value.reason is Reason.READ_ERROR
    monkeypatch.undo()
    (view,) = reader.read(source, spans[4:])
    assert view == content[4 * READ_NBYTES : 5 * READ_NBYTES]


def test_offsets_that_the_disk_refuses_are_read_through_the_page_cache(
    path, reader, content, monkeypatch
):
    preadv = os.preadv
    with path.open("rb") as file, path.open("rb") as direct:

        def refuse(fd, buffers, offset, *flags):
            if fd == direct.fileno():
                raise OSError(errno.EINVAL, "Invalid argument")
            return preadv(fd, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", refuse)
        (view,) = reader.read(
            Reading(file.fileno(), _AHEAD, direct.fileno(), True), [span(7, 5000)]
        )
        assert view == content[7:5007]


@pytest.mark.parametrize("takes_s", [1e-5, 1.0])
def test_page_cache_is_left_where_copies_from_it_take_a_core_long(
    path, reader, content, monkeypatch, takes_s
):
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * takes_s)
    preadv, used = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: used.append(fd) or preadv(fd, *rest))
    blocks = [span(number * READ_NBYTES, READ_NBYTES) for number in range(5)]
    with path.open("rb") as file, path.open("rb") as direct:
        for _ in range(6):
            views = reader.read(Reading(file.fileno(), 1, direct.fileno()), blocks)
            assert b"".join(map(bytes, views)) == content[: 5 * READ_NBYTES]
        later = {direct.fileno() if takes_s == 1.0 else file.fileno()}
        assert set(used[:10]) == {file.fileno()}
        assert set(used[-10:]) == later


def test_iterator_that_is_closed_waits_for_its_reads(path, reader, monkeypatch):
    preadv = os.preadv
    left = []

    def count(fd, buffers, offset, *flags):
        try:
            return preadv(fd, buffers, offset, *flags)
        finally:
            left.append(offset)

    monkeypatch.setattr(os, "preadv", count)
    with path.open("rb") as file:
        spans = [span(number * READ_NBYTES, READ_NBYTES) for number in range(5)]
        views = reader.read(Reading(file.fileno(), _AHEAD), spans)
        next(views)
        views.close()
        done = len(left)
    assert done >= 1
    assert len(left) == done
