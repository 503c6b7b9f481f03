"""The budget evicts the right segments, and refuses a load with no room in one clear message."""

import pytest

from shmload._segments.listing import SegmentInfo
from shmload._service import budget as budget_module
from shmload._service.budget import budget_warnings, choose_victims
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
    return [info.name for info in choose_victims(RESIDENT, nbytes, budget, room)]


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
        choose_victims(resident, 2 * GIB, GIB, 99 * GIB)
    return str(caught.value)


def test_refusal_advises_what_can_help():
    empty = refusal([])
    assert "the service's budget leaves 1.00 GiB; raise `shmload serve --budget`" in empty
    assert "SHMLOAD_SERVICE=off" in empty
    assert "users" not in empty
    assert "`shmload rm`" not in empty
    both = refusal(RESIDENT)
    assert "end the users of the 1 in use" in both
    assert "the 1 pinned with `shmload rm`" in both
    assert "pinned" not in refusal([segment("leased", is_leased=True)])
    assert "users" not in refusal([segment("pinned", is_pinned=True)])


@pytest.mark.parametrize(
    ("budget", "group", "said"),
    [
        (4 * GIB, None, []),
        (3 * GIB, None, ["4.00 GiB are resident already"]),
        (40 * GIB, None, ["/dev/shm allows for 8.00 GiB"]),
        (6 * GIB, 5 * GIB, ["the memory control group allows for 5.00 GiB"]),
    ],
)
def test_budget_that_will_not_be_kept_to_is_warned_of(monkeypatch, budget, group, said):
    monkeypatch.setattr(budget_module, "shm_total_nbytes", lambda: 8 * GIB)
    monkeypatch.setattr(budget_module, "cgroup_limit_nbytes", lambda: group)
    found = list(budget_warnings(budget, RESIDENT))
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence
