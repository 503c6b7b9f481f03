"""Loads wait for room one behind the other, and are refused only if nothing could make room."""

import contextlib
import threading

import pytest

from shmload._segments import room
from shmload._service.budget import Reservations, service_budget
from shmload.errors import SharedMemoryFull


class Memory:
    """A memory of ten units; `held` are in use for good unless a test frees them."""

    units = 10
    held = 0

    def evict_for(self, nbytes, budget, reserved):
        if self.held + reserved + nbytes > self.units:
            raise SharedMemoryFull(nbytes, self.units - self.held - reserved, "test", "")
        return []

    def require_possible(self, nbytes, budget, reserved=0):
        if nbytes > self.units:
            raise SharedMemoryFull(nbytes, self.units, "test", "")


class Waiter(threading.Thread):
    """A thread that wants room, and keeps it until `done` is set."""

    def __init__(self, reservations, nbytes, timeout_s=60):
        super().__init__()
        self._reservations = reservations
        self._wanted = nbytes, timeout_s
        self.waits, self.has_room, self.done = (threading.Event() for _ in range(3))
        self.error = None
        self.start()

    def run(self):
        with self._reservations.claim() as claim:
            try:
                self._reservations.reserve(claim, *self._wanted, self.waits.set)
            except SharedMemoryFull as exc:
                self.error = exc
                return
            self.has_room.set()
            assert self.done.wait(60)

    def end(self):
        self.done.set()
        self.join()


@pytest.fixture
def memory(monkeypatch):
    made = Memory()
    monkeypatch.setattr(room, "evict_for", made.evict_for)
    monkeypatch.setattr(room, "require_possible", made.require_possible)
    return made


@pytest.fixture
def reservations(memory):
    return Reservations(service_budget(memory.units))


def test_large_one_is_not_overtaken_by_small_ones(reservations):
    running = [Waiter(reservations, 5) for _ in range(2)]
    for each in running:
        assert each.has_room.wait(60)
    large = Waiter(reservations, 9)
    assert large.waits.wait(60)
    small = Waiter(reservations, 2)
    assert small.waits.wait(60)
    assert reservations.waiting == 2
    running[0].end()  # room for the small one, which came later
    large.waits.clear()
    small.waits.clear()
    assert small.waits.wait(60)
    assert not small.has_room.is_set()
    running[1].end()
    assert large.has_room.wait(60)
    large.end()
    assert small.has_room.wait(60)
    small.end()


def test_what_nothing_can_make_room_for_is_refused_and_the_next_goes_ahead(reservations, memory):
    memory.held = 5
    large = [Waiter(reservations, 9) for _ in range(2)]
    assert large[0].waits.wait(60)
    small = Waiter(reservations, 2)
    assert small.has_room.wait(60)
    small.end()
    for each in large:
        each.join(60)
        assert "leaves" in str(each.error)
        assert "SHMLOAD_WAIT_TIMEOUT_S" not in str(each.error)  # it was refused before its deadline


def test_load_that_waits_for_others_does_not_count_as_running(reservations, memory):
    with reservations.claim() as claim:
        reservations.reserve(claim, 5, 60, pytest.fail)
        memory.held = 5
        claim.nbytes = 0  # its segments are in use; it waits for a part of the next one
        with reservations.claim() as other, pytest.raises(SharedMemoryFull, match="leaves 5 B"):
            reservations.reserve(other, 9, 60, lambda: None)


@pytest.mark.parametrize("nbytes", [0, 5])
def test_load_that_ends_soon_is_waited_for(reservations, memory, monkeypatch, nbytes):
    monkeypatch.setattr(room, "_SETTLE_S", 0.0)
    with reservations.claim() as claim:
        if nbytes:  # else it only attaches
            reservations.reserve(claim, nbytes, 60, pytest.fail)
        memory.held = 5
        claim.nbytes, claim.is_ending = 0, True
        other = Waiter(reservations, 9)
        for _ in range(3):
            other.waits.clear()
            assert other.waits.wait(60)
        memory.held = 0
    assert other.has_room.wait(60)
    other.end()


def test_loads_that_come_later_and_only_attach_hold_up_no_refusal(reservations, memory):
    memory.held = 5
    waiting = Waiter(reservations, 9, timeout_s=20)
    assert waiting.waits.wait(60)
    with contextlib.ExitStack() as attached:
        while waiting.is_alive():
            attached.enter_context(reservations.claim()).is_ending = True
            waiting.join(0.05)
    assert "SHMLOAD_WAIT_TIMEOUT_S" not in str(waiting.error)  # it was refused before its deadline


@pytest.mark.parametrize("is_first", [True, False])
def test_wait_has_a_deadline(reservations, is_first):
    with reservations.claim() as claim, reservations.claim() as other:
        reservations.reserve(claim, 5, 60, pytest.fail)
        ahead = None if is_first else Waiter(reservations, 9)
        assert is_first or ahead.waits.wait(60)
        with pytest.raises(SharedMemoryFull, match="SHMLOAD_WAIT_TIMEOUT_S") as caught:
            reservations.reserve(other, 8, 0, pytest.fail)
        said = "leaves 5 B" if is_first else "ahead of this one after 0 s"
        assert said in str(caught.value)
        assert is_first or "raise `shmload serve --budget`" in str(caught.value)
        claim.nbytes = 0
        if ahead:
            assert ahead.has_room.wait(60)
            ahead.end()


def test_what_ends_the_wait_leaves_the_queue(reservations):
    class Gone(Exception):
        pass

    def leave():
        raise Gone

    with reservations.claim() as claim:
        reservations.reserve(claim, 10, 60, pytest.fail)
        with reservations.claim() as other, pytest.raises(Gone):
            reservations.reserve(other, 1, 60, leave)
        assert reservations.waiting == 0
        assert reservations.nbytes == 10


def test_what_can_never_fit_is_refused_at_once_behind_others(reservations):
    with reservations.claim() as claim, reservations.claim() as other:
        reservations.reserve(claim, 10, 60, pytest.fail)
        waiting = Waiter(reservations, 10)
        assert waiting.waits.wait(60)
        with pytest.raises(SharedMemoryFull):
            reservations.reserve(other, 11, 60, pytest.fail)
        claim.nbytes = 0
    assert waiting.has_room.wait(60)
    waiting.end()
