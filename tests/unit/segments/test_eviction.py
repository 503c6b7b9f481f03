"""The budget evicts the right segments, and refuses a load with no room in one clear message."""

import pytest

from shmload._segments.eviction import choose_victims
from shmload._segments.listing import SegmentInfo
from shmload._service.budget import service_budget
from shmload.errors import SharedMemoryFull

GIB = 1 << 30


def segment(name, *, nbytes=GIB, used_at=0.0, is_leased=False, is_pinned=False):
    return SegmentInfo(
        name=name,
        source="/m/model.safetensors",
        conversion="BF16",
        nbytes=nbytes,
        created_at=0.0,
        creator="",
        digest="",
        is_leased=is_leased,
        is_current=True,
        used_at=used_at,
        is_pinned=is_pinned,
    )


RESIDENT = [
    segment("late", used_at=2.0),
    segment("early", used_at=1.0),
    segment("leased", is_leased=True),
    segment("pinned", is_pinned=True),
]


def names(nbytes, budget, room):
    return [info.name for info in choose_victims(RESIDENT, nbytes, room, service_budget(budget))]


def test_nothing_goes_where_there_is_room():
    assert names(GIB, 5 * GIB, GIB) == []


@pytest.mark.parametrize(("budget", "room"), [(4 * GIB, GIB), (9 * GIB, 1), (4 * GIB, -GIB + 1)])
def test_least_recently_used_goes_for_the_budget_and_for_the_memory(budget, room):
    wanted = ["early", "late"] if room < 0 else ["early"]
    assert names(GIB, budget, room) == wanted


def test_memory_that_cannot_be_freed_is_not_the_budgets_refusal():
    assert names(9 * GIB, 20 * GIB, 0) == ["early", "late"]


def refusal(resident):
    with pytest.raises(SharedMemoryFull) as caught:
        choose_victims(resident, 2 * GIB, 99 * GIB, service_budget(GIB))
    return str(caught.value)


def test_refusal_advises_what_can_help():
    empty = refusal([])
    assert "the service's budget leaves 1.00 GiB; raise `shmload serve --budget`" in empty
    assert "SHMLOAD_SERVICE=off" in empty
    assert "users" not in empty
    assert "`shmload unpin`" not in empty
    both = refusal(RESIDENT)
    assert "end the users of the 1 in use" in both
    assert "the 1 pinned go with `shmload unpin`" in both
    assert "pinned" not in refusal([segment("leased", is_leased=True)])
    assert "users" not in refusal([segment("pinned", is_pinned=True)])
