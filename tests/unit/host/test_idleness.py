"""Work in the background begins only on a machine that has nothing better to do."""

import pytest

from shmload._host import idleness
from shmload._host.idleness import Load, why_wait

_NEED = 1 << 30


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (Load(2, 0.0, 8 << 30), ""),
        (Load(2, 0.8, 8 << 30), ""),
        (Load(2, 0.9, 8 << 30), "0.9 of 2 cores are busy"),
        (Load(16, 6.0, 8 << 30), ""),
        (Load(16, 7.0, 8 << 30), "7.0 of 16 cores are busy"),
        (Load(2, 0.0, _NEED), ""),
        (Load(2, 0.0, _NEED - 1), "only 1024.00 MiB of memory are free"),
        (Load(2, 0.0, 8 << 30, stalled=5.0), ""),
        (Load(2, 0.0, 8 << 30, stalled=7.0), "processes wait for memory (7 % of the time)"),
    ],
)
def test_machine_is_idle_enough_or_the_reason_is_given(load, reason):
    assert why_wait(load, _NEED) == reason


def test_time_of_niced_processes_counts_as_idle(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 5000 30 800 20 1 2 7 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert idleness._ticks(stat) == (140, 5960)


def test_this_machine_is_observed():
    load = idleness.observe(0.0)
    assert load.cores >= 1
    assert load.free_nbytes > 0
    assert 0 <= load.busy_cores <= load.cores
