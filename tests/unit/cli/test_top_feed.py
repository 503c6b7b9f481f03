"""How the rows of `shmload top` come from the listing of models and the service's status."""

import queue
import threading

import msgspec
from statuses import STATUS

from shmload._cli.top import Feed
from shmload._cli.top_view import Snapshot, make_rows
from shmload._segments.grouping import Model
from shmload._segments.models import Models, UnfinishedModel
from shmload._segments.users import User
from shmload._service.protocol import ModelUse

FLUX = Model(
    name="flux",
    id="0123abcd",
    dtype="bfloat16",
    components=(),
    nbytes=100,
    source="/m/flux",
    segments=(),
    shared_with=(),
    used_by=(User(pid=7, command="python server.py", program="server.py"),),
    is_leased=True,
    created_at=1,
    used_at=2,
    is_pinned=False,
    pinned_segments=0,
    keep_for_s=0,
    is_current=True,
)
DECODE = UnfinishedModel(
    name="flux",
    dtype="bfloat16",
    source="/m/flux",
    variant="",
    parts=1,
    nbytes=50,
    done_nbytes=10,
    elapsed_s=5,
    bytes_per_s=2,
    built_by=(),
)
USE = ModelUse(
    model="flux",
    source="/m/flux",
    variant="",
    hits=3,
    misses=1,
)


def test_resident_model_has_its_counters_and_users():
    (row,) = make_rows(Models([FLUX]), msgspec.structs.replace(STATUS, models=(USE,)))
    assert (row.name, row.nbytes, row.hits, row.misses) == ("flux", 100, 3, 1)
    assert row.users == "7 server.py"
    assert row.model_id == "0123abcd"
    assert row.done is None


def test_model_that_is_being_decoded_is_one_row_with_its_resident_part():
    (row,) = make_rows(Models([FLUX], [DECODE]), STATUS)
    assert (row.nbytes, row.done, row.bytes_per_s) == (150, 0.2, 2)
    assert row.model_id == "0123abcd"


def test_other_dtype_is_a_row_of_its_own_and_what_is_decoded_comes_first():
    other = msgspec.structs.replace(DECODE, dtype="float16")
    rows = make_rows(Models([FLUX], [other]), STATUS)
    assert [(row.dtype, row.model_id) for row in rows] == [
        ("float16", ""),
        ("bfloat16", "0123abcd"),
    ]


def test_without_a_service_rows_lack_the_counters_only():
    (row,) = make_rows(Models([FLUX]), None)
    assert (row.name, row.hits) == ("flux", 0)


def test_what_an_order_came_to_is_said_with_the_rows_that_show_it(monkeypatch):
    looks, may_end = queue.SimpleQueue(), threading.Semaphore(1)

    def look(feed):
        looks.put(None)
        assert may_end.acquire(timeout=60)
        return Snapshot(status=None, rows=(), trouble="later" if feed.latest.trouble else "first")

    monkeypatch.setattr(Feed, "_look", look)
    with Feed() as feed:
        feed.order(lambda: "pinned flux")
        looks.get(timeout=60)
        looks.get(timeout=60)  # the order is done
        assert (feed.message, feed.latest.trouble) == ("", "first")
        feed.order(lambda: "")
        may_end.release()
        looks.get(timeout=60)
        assert (feed.message, feed.latest.trouble) == ("pinned flux", "later")
        for _ in range(3):
            may_end.release()
