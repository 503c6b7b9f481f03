"""The budget evicts the right segments, and refuses a load with no room in one clear message."""

import pytest
from listed import GIB, listed

from shmload._segments.eviction import choose_victims
from shmload._service.notice import service_budget
from shmload.errors import SharedMemoryFull

RESIDENT = [
    listed("late", used_at=2.0),
    listed("early", used_at=1.0),
    listed("leased", is_leased=True),
    listed("pinned", is_pinned=True),
]


def names(nbytes, budget, room):
    return [info.name for info in choose_victims(RESIDENT, nbytes, room, service_budget(budget))]


@pytest.mark.parametrize(("budget", "room"), [(4 * GIB, GIB), (9 * GIB, 1), (4 * GIB, -GIB + 1)])
def test_least_recently_used_goes_for_the_budget_and_for_the_memory(budget, room):
    wanted = ["early", "late"] if room < 0 else ["early"]
    assert names(GIB, budget, room) == wanted


def test_what_a_publication_needs_goes_after_it():
    base = listed("base", needed_by=("shm:x@1",))
    other = listed("other", used_at=1.0)
    idle = listed("idle", used_at=2.0, source="shm:x@1", created_at=1.0)
    budget = service_budget(3 * GIB)
    for count, wanted in ((1, ["other"]), (2, ["other", "idle"]), (3, ["other", "idle", "base"])):
        victims = choose_victims([base, other, idle], count * GIB, 9 * GIB, budget)
        assert [info.name for info in victims] == wanted
    pinned = listed("pinned", source="shm:x@1", is_pinned=True, created_at=1.0)
    assert [each.name for each in choose_victims([base, other, pinned], GIB, 9 * GIB, budget)] == [
        "other"
    ]
    with pytest.raises(SharedMemoryFull):
        choose_victims([base, other, pinned], 2 * GIB, 9 * GIB, budget)


def test_needs_rule_the_order_though_all_were_made_and_used_at_once():
    base = listed("base", needed_by=("shm:x@1",))
    needed = listed("needed", source="shm:x@1", needed_by=("shm:y@1", "shm:z@1"))
    users = [listed(name, source=f"shm:{name}@1") for name in "yz"]
    victims = choose_victims([base, needed, *users], 4 * GIB, 9 * GIB, service_budget(4 * GIB))
    assert [info.name for info in victims] == ["y", "z", "needed", "base"]


def test_memory_that_cannot_be_freed_is_not_the_budgets_refusal():
    assert names(9 * GIB, 20 * GIB, 0) == ["early", "late"]


def refusal(resident, nbytes=2 * GIB, budget=3 * GIB):
    with pytest.raises(SharedMemoryFull) as caught:
        choose_victims(resident, nbytes, 99 * GIB, service_budget(budget))
    return str(caught.value)


LEASED, PINNED = (
    listed("leased", is_leased=True, nbytes=2 * GIB),
    listed("pinned", is_pinned=True, nbytes=2 * GIB),
)


def test_refusal_advises_what_can_help():
    said = refusal([LEASED, PINNED], budget=4 * GIB)
    assert "end processes that use models (`shmload ls`), or unpin models" in said
    assert said.endswith("or raise `shmload serve --budget`")


def test_refusal_of_more_than_the_budget_advises_nothing_that_cannot_help():
    said = refusal([LEASED, PINNED], budget=GIB)
    assert "larger than the whole budget of 1.00 GiB: raise `shmload serve --budget`" in said
    assert "users" not in said
    assert "unpin" not in said
