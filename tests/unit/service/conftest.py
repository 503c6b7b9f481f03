"""A service's state for the unit tests of the service."""

import pytest

from shmload._service import pool
from shmload._service.state import ServiceState


@pytest.fixture
def state(monkeypatch):
    """A service's state whose workers are not started."""

    class Nobody:
        workers = 1

        def ended(self):
            return []

        def silent_workers(self, timeout_s):
            return 0

        def close(self):
            pass

    monkeypatch.setattr(pool, "Coordinator", lambda count: Nobody())
    made = ServiceState(1, 1 << 30)
    yield made
    made.close()
