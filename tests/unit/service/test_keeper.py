"""A budget that will not be kept to is warned of at the service's start."""

import pytest
from listed import GIB

from shmload._service import keeper
from shmload._service.keeper import budget_warnings


@pytest.mark.parametrize(
    ("budget", "group", "said"),
    [
        (4 * GIB, None, []),
        (40 * GIB, None, ["/dev/shm allows for 8.00 GiB"]),
        (6 * GIB, 5 * GIB, ["the memory control group allows for 5.00 GiB"]),
    ],
)
def test_budget_that_will_not_be_kept_to_is_warned_of(monkeypatch, budget, group, said):
    monkeypatch.setattr(keeper, "shm_total_nbytes", lambda: 8 * GIB)
    monkeypatch.setattr(keeper, "cgroup_limit_nbytes", lambda: group)
    found = list(budget_warnings(budget))
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def test_budget_of_nothing_is_warned_of():
    (said,) = budget_warnings(0)
    assert said == "the budget is 0: each load that keeps weights is refused"
