"""Clients take turns at the workers, and asking the workers for a sign of life is no turn."""

import os
import select
import signal
import threading

import pytest

from shmload._service import pool as pool_module
from shmload._service.pool import WorkerPool


class Workers:
    """Fake workers that decode nothing, and wait for a go."""

    def __init__(self, may_end):
        self._may_end = may_end

    def ended(self):
        return []

    def decode(self, jobs, on_bytes, is_cancelled, stall_timeout_s):
        assert self._may_end.wait(60)
        return []

    def close(self):
        pass


def test_waiting_client_does_not_hold_up_the_decode(monkeypatch):
    is_asked, is_over = threading.Event(), threading.Event()
    monkeypatch.setattr(pool_module, "Coordinator", lambda count: Workers(is_asked))
    pool = WorkerPool(1)
    outcomes = []

    has_begun = threading.Event()

    def decode_first():
        pool.decode([], int, bool, 60, has_begun.set)
        is_over.set()

    def ask():
        is_asked.set()
        outcomes.append(is_over.wait(20))
        return False

    first = threading.Thread(target=decode_first)
    first.start()
    assert has_begun.wait(60)
    assert pool.decode([], int, ask, 60) == []
    first.join()
    assert outcomes == [True]


# Asking -------------------------------------------------------------------------------------------


class Asked(Workers):
    """Fake workers that answer once they are told to."""

    def __init__(self, is_asked, may_answer):
        super().__init__(may_answer)
        self._is_asked, self._may_answer = is_asked, may_answer

    def silent_workers(self, timeout_s):
        self._is_asked.set()
        assert self._may_answer.wait(60)
        return 1


@pytest.fixture
def asking(monkeypatch):
    """A pool whose workers are being asked; sets the event so that they answer."""
    is_asked, may_answer = threading.Event(), threading.Event()
    monkeypatch.setattr(pool_module, "Coordinator", lambda count: Asked(is_asked, may_answer))
    pool = WorkerPool(2)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(pool.silent_workers()))
    thread.start()
    assert is_asked.wait(60)
    yield pool, may_answer, answers
    may_answer.set()
    thread.join()


def test_decode_waits_for_the_answer(asking):
    pool, may_answer, answers = asking
    waits, has_begun = threading.Event(), threading.Event()

    def wait():
        waits.set()
        return False

    decode = threading.Thread(target=lambda: pool.decode([], int, wait, 60.0, has_begun.set))
    decode.start()
    assert waits.wait(60)
    assert not has_begun.is_set()
    may_answer.set()
    decode.join()
    assert answers == [1]


def test_workers_at_a_decode_are_not_asked(monkeypatch):
    may_end, has_begun = threading.Event(), threading.Event()
    monkeypatch.setattr(pool_module, "Coordinator", lambda count: Workers(may_end))
    pool = WorkerPool(2)
    decode = threading.Thread(target=lambda: pool.decode([], int, bool, 60.0, has_begun.set))
    decode.start()
    assert has_begun.wait(60)
    assert pool.silent_workers() == 0
    may_end.set()
    decode.join()


def test_closed_pool_starts_no_workers_to_ask(monkeypatch):
    started = []
    monkeypatch.setattr(
        pool_module, "Coordinator", lambda count: started.append(1) or Workers(threading.Event())
    )
    pool = WorkerPool(2)
    pool.close()
    assert pool.silent_workers() == 2
    assert started == [1]


def test_worker_that_ended_between_decodes_is_logged(caplog):
    pool = WorkerPool(1)
    try:
        (worker,) = pool._coordinator._workers
        os.kill(worker.child.pid, signal.SIGKILL)
        assert select.select([worker.child.pidfd], [], [], 60)[0]
        pool.silent_workers()
        (said,) = caplog.messages
        assert said == f"worker {worker.child.pid} ended between decodes (SIGKILL); new ones start"
        assert caplog.records[0].pid == worker.child.pid
        pool.silent_workers()
        assert len(caplog.messages) == 1
    finally:
        pool.close()
