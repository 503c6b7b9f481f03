"""A budget limits what is resident: the least recently used goes first."""

import contextlib
import threading

import pytest
from warming import SHM

import shmload
from shmload._loading import room
from shmload._segments.eviction import Budget
from shmload._segments.layout import Layout
from shmload._segments.names import lock_name, try_turn
from shmload._segments.part import acquire
from shmload.errors import SharedMemoryFull

_SEGMENT = (1 << 20) + 4096


def resident():
    return [info.source for info in shmload.segments()]


@pytest.fixture
def two_fit(configure, evicts):
    """A budget of two segments and a half."""
    configure(budget=5 * _SEGMENT // 2)


def test_least_recently_used_goes_for_what_is_kept(shards, two_fit):
    for path in shards[:2]:
        shmload.warm(path, dtype="bfloat16")
    shmload.warm(shards[0], dtype="bfloat16")  # its last use is now the newest
    shmload.load_state_dict(shards[2], "bfloat16")  # is not kept, so it takes nothing from it
    assert resident() == [str(path) for path in shards[:2]]
    state = shmload.load_state_dict(shards[2], "bfloat16", keep=True)
    assert resident() == [str(shards[0]), str(shards[2])]
    assert state["weight"].eq(2).all()


def test_what_is_in_use_or_pinned_stays_and_the_rest_is_refused(shards, two_fit):
    shmload.warm(shards[0], dtype="bfloat16", pin=True)
    state = shmload.load_state_dict(shards[1], "bfloat16", keep=True)
    with pytest.raises(SharedMemoryFull, match="SHMLOAD_BUDGET leaves 514") as caught:
        shmload.warm(shards[2], dtype="bfloat16")
    assert "end processes that use models (`shmload ls`)" in str(caught.value)
    assert "raise SHMLOAD_BUDGET" in str(caught.value)
    assert "service" not in str(caught.value)
    assert resident() == [str(path) for path in shards[:2]]
    assert state["weight"].eq(1).all()


def other_decode(path, *, keeps=True):
    """Begin to build a file's segment, as another load does; it holds the part."""
    (planned,) = shmload.plan(path, dtype="bfloat16", keep=True).shards
    part = acquire(planned.segment, needs_name=keeps)
    header = (1 << 12).to_bytes(8, "little") + b" " * 4088
    part.prepare(Layout(header=header, pieces=(), nbytes=len(header) + (1 << 20)))
    return part


def test_load_waits_while_another_decodes(shards, configure, evicts, monkeypatch, caplog):
    monkeypatch.setattr(room, "_QUIET_S", 0)
    configure(budget=3 * _SEGMENT // 2)
    with contextlib.closing(other_decode(shards[0])):
        warming = threading.Thread(
            target=shmload.warm, args=(shards[1],), kwargs={"dtype": "bfloat16"}
        )
        warming.start()
        while "waiting for 1.00 MiB of room in SHMLOAD_BUDGET" not in caplog.text:
            assert warming.is_alive()
        assert resident() == []
    warming.join()
    assert resident() == [str(shards[1])]
    assert not (SHM / lock_name("room")).exists()


def test_decode_of_what_is_not_kept_takes_nothing_from_it(shards, configure, evicts):
    configure(budget=3 * _SEGMENT // 2, wait_timeout_s=0.1)
    with contextlib.closing(other_decode(shards[0], keeps=False)):
        shmload.warm(shards[1], dtype="bfloat16")
    assert resident() == [str(shards[1])]


def test_wait_has_a_deadline(shards, configure, evicts):
    configure(budget=3 * _SEGMENT // 2, wait_timeout_s=0.1)
    with (
        contextlib.closing(other_decode(shards[0])),
        pytest.raises(SharedMemoryFull, match=r"not within 0.1 s \(SHMLOAD_WAIT_TIMEOUT_S\)"),
    ):
        shmload.warm(shards[1], dtype="bfloat16")


def test_loads_at_once_stay_within_it(shards, two_fit):
    errors = []

    def warm(path):
        try:
            shmload.warm(path, dtype="bfloat16")
        except shmload.ShmloadError as exc:
            errors.append(exc)

    warming = [threading.Thread(target=warm, args=(path,)) for path in shards]
    for each in warming:
        each.start()
    for each in warming:
        each.join()
    assert errors == []
    assert len(resident()) == 2


def test_budget_of_the_service_rules_where_one_runs(service, shards, configure):
    service("--budget", str(4 * _SEGMENT))
    configure(budget=1 << 20)
    for path in shards:
        shmload.warm(path, dtype="bfloat16")
    assert len(resident()) == 4


@pytest.mark.parametrize("limit", [None, Budget(1 << 40, "a budget", "raise it")])
def test_one_load_at_a_time_looks_for_room(limit):
    asked, seen = threading.Event(), []

    def ask():
        asked.set()
        return False

    def look():
        with room.made_room(1 << 20, limit, ask):
            seen.append("room")

    second = threading.Thread(target=look)
    with room.made_room(1 << 20, limit, ask):
        second.start()
        for _ in range(3):
            asked.clear()
            assert asked.wait(10)
        assert seen == []  # what the first is to decode has no length yet
    second.join()
    assert seen == ["room"]


def test_load_without_a_budget_waits_for_no_stopped_process(shards, monkeypatch, caplog):
    monkeypatch.setattr(room, "_QUIET_S", 0)
    monkeypatch.setattr(room, "_TURN_S", 0.1)
    with try_turn("room") as is_mine:
        assert is_mine
        assert shmload.load_state_dict(shards[1], "bfloat16")["weight"].eq(1).all()
    assert caplog.messages == ["waiting at most 0.1 s for another process that looks for room"]
