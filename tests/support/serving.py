"""Starts a service in a child process for one test."""

import pytest
from watching import until

from shmload._service.notice import require_service

# Prints a line when it serves and when it has ended.
SERVE = """
import sys
from shmload._cli import service
from shmload._cli.main import main
service.notify_systemd = lambda message: print(message, flush=True)
main(["serve", *sys.argv[1:]], standalone_mode=False)
print("ENDED", flush=True)
"""


@pytest.fixture
def service(new_child, configure, evicts):
    """Start a service and wait until it serves: `service("--budget", "1MB")`."""
    configure(inline_nbytes=0, workers=1)

    def start(*arguments):
        process = new_child(SERVE, *arguments)
        process.expect("READY=1")
        return process

    return start


def wait_until(is_so):
    """Poll the service's status until a condition holds."""
    until(lambda: is_so(require_service()))
