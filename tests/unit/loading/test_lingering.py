"""A rank keeps its leases until a second after all ranks have come, or for a minute."""

import threading
from types import SimpleNamespace

import pytest

from shmload._loading import holdings
from shmload._settings import _LOCAL_SIZES, local_world_size


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "-4"}, 1),
        ({"WORLD_SIZE": "8"}, 1),
    ],
)
def test_ranks_on_this_host_are_what_the_launcher_says(monkeypatch, variables, size):
    for name in _LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_world_size() == size


class Leases:
    """The leases, their holders, and a fake clock on which they change."""

    def __init__(self, *names, arrivals=()):
        self.segments = [SimpleNamespace(name=name, is_shared=True) for name in names]
        self.open = []
        self.inherited = []
        self.now_s = 0.0
        self._arrivals = arrivals

    def take(self, segment, *, crosses_forks):
        self.open.append(segment.name)
        self.inherited.append(crosses_forks)
        return SimpleNamespace(name=segment.name, close=lambda: self.open.remove(segment.name))

    def holders(self, names):
        assert self.open == list(names)
        return {
            name: {pid for pid, came_s, at in self._arrivals if at == name and came_s <= self.now_s}
            for name in names
        }

    def sleep(self, seconds):
        assert 0 < seconds <= 1
        self.now_s += seconds


@pytest.fixture
def lingering(monkeypatch):
    """Run the wait of one rank of two to its end; return its leases."""

    def wait(*names, **kwargs):
        leases = Leases(*names, **kwargs)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setattr(holdings, "Lease", leases.take)
        monkeypatch.setattr(holdings, "holders", leases.holders)
        clock = SimpleNamespace(monotonic=lambda: leases.now_s, sleep=leases.sleep)
        monkeypatch.setattr(holdings, "time", clock)
        holdings.linger(leases.segments)
        for thread in threading.enumerate():
            if thread.name == "shmload-linger":
                thread.join(10)
        return leases

    return wait


def test_leases_go_after_a_minute_if_some_never_come(lingering):
    leases = lingering("a", "b", arrivals=[(1, 0.0, "a"), (1, 0.0, "b"), (2, 0.0, "a")])
    assert leases.open == []
    assert leases.now_s == pytest.approx(60.0, abs=0.3)
