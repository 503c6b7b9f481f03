"""A service's state for the unit tests of the service."""

import pytest

from shmload._service.state import ServiceState


@pytest.fixture
def state():
    """A service's state."""
    made = ServiceState(1 << 30)
    yield made
    made.close()
