"""A worker fetches the ranges that a piece needs, in the order in which they are needed."""

import threading

import pytest

from shmload._checkpoints.remote import FetchError, RemoteObject
from shmload._segments.pieces import Run
from shmload.workers import ranges
from shmload.workers.ranges import RangeReader, spans_of

MB = 1 << 20
CONTENT = bytes(range(251)) * 100_000
OBJECT = RemoteObject(url="s3://b/model.safetensors", nbytes=len(CONTENT), tag="t")


def run(source_offset, nbytes, target_offset=0):
    return Run(
        source_offset=source_offset,
        target_offset=target_offset,
        count=nbytes // 2,
        source="F16",
        target="F16",
    )


@pytest.mark.parametrize(
    ("runs", "spans"),
    [
        ([], []),
        ([(8, 100)], [(8, 108)]),
        ([(0, 20 * MB)], [(0, 8 * MB), (8 * MB, 16 * MB), (16 * MB, 20 * MB)]),
        ([(0, 100), (100, 50)], [(0, 150)]),
        ([(0, 100), (1000, 50)], [(0, 1050)]),  # a small gap is read, too
        ([(0, 100), (MB, 50)], [(0, 100), (MB, MB + 50)]),
        ([(1000, 100), (0, 50)], [(1000, 1100), (0, 50)]),
    ],
)
def test_spans(runs, spans):
    assert list(spans_of(run(*each) for each in runs)) == spans


@pytest.fixture
def reader(monkeypatch):
    asked = []

    def fetch(wanted, begin, end):
        asked.append((begin, end))
        return CONTENT[begin:end]

    monkeypatch.setattr(ranges, "fetch", fetch)
    reader = RangeReader(OBJECT)
    reader.asked = asked
    yield reader
    reader.close()


def read_all(reader, runs, block=1 << 20):
    found = b""
    for each in runs:
        end = each.source_offset + 2 * each.count
        for first in range(each.source_offset, end, block):
            buffer = memoryview(bytearray(min(block, end - first)))
            reader.read(buffer, first)
            found += bytes(buffer)
    return found


@pytest.mark.parametrize("block", [1 << 20, 12_345])
def test_bytes_come_in_the_order_of_the_runs(reader, block):
    runs = [run(16, 20 * MB), run(21 * MB, 400), run(2, 8), run(22 * MB, 100)]
    reader.begin(runs, lambda _: None)
    wanted = b"".join(CONTENT[r.source_offset : r.source_offset + 2 * r.count] for r in runs)
    assert read_all(reader, runs, block) == wanted


def test_no_range_is_asked_for_twice(reader):
    runs = [run(0, 20 * MB)]
    reader.begin(runs, lambda _: None)
    read_all(reader, runs)
    assert sorted(reader.asked) == list(spans_of(runs))


def test_next_piece_forgets_the_last(reader):
    reader.begin([run(0, 20 * MB)], lambda _: None)
    reader.begin([run(4, 10)], lambda _: None)
    assert read_all(reader, [run(4, 10)]) == CONTENT[4:14]


def test_error_of_a_request_is_raised(monkeypatch):
    def fail(*_):
        raise FetchError("no")

    monkeypatch.setattr(ranges, "fetch", fail)
    reader = RangeReader(OBJECT)
    reader.begin([run(0, 8)], lambda _: None)
    with pytest.raises(FetchError, match="no"):
        read_all(reader, [run(0, 8)])
    reader.close()


def test_worker_says_that_it_lives_while_it_waits(monkeypatch):
    said = threading.Event()

    def fetch(wanted, begin, end):
        assert said.wait(20)
        return CONTENT[begin:end]

    monkeypatch.setattr(ranges, "fetch", fetch)
    monkeypatch.setattr(ranges, "_SIGN_OF_LIFE_S", 0.01)
    reader = RangeReader(OBJECT)
    reader.begin([run(0, 8)], lambda nbytes: said.set())
    assert read_all(reader, [run(0, 8)]) == CONTENT[:8]
    reader.close()
