"""A client that waits for its turn at the workers does not hold up the one that decodes."""

import threading

from shmload._service import pool as pool_module
from shmload._service.pool import WorkerPool


class Workers:
    """Fake workers that decode nothing, and wait for a go."""

    is_intact = True

    def __init__(self, may_end):
        self._may_end = may_end

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

    def decode_first():
        pool.decode([], int, bool, 60)
        is_over.set()

    def ask():
        is_asked.set()
        outcomes.append(is_over.wait(20))
        return False

    first = threading.Thread(target=decode_first)
    first.start()
    while not pool.is_decoding:
        pass
    assert pool.decode([], int, ask, 60) == []
    first.join()
    assert outcomes == [True]
