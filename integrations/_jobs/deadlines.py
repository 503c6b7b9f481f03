"""By when a job's processes must have started or ended."""

import time

from shmload._settings import settings
from shmload.errors import JobFailed
from shmload.integrations._jobs.processes import Processes


def check_starts(processes: Processes) -> None:
    """Raise an error if a process has not started in time. Call this once messages are read.

    Raises:
        JobFailed: the pipeline is not loaded, or a runner not ready, within `wait_timeout_s`.
    """
    limit = settings().wait_timeout_s
    late = time.monotonic() - limit
    server = processes.server
    if not server.is_prepared and server.since < late:
        raise JobFailed(
            f"the pipeline was not loaded within {limit:g} s; raise SHMLOAD_WAIT_TIMEOUT_S"
        )
    for runner in processes.runners.values():
        if not runner.is_started and runner.since < late:
            raise JobFailed(
                f"a process was not ready within {limit:g} s; raise SHMLOAD_WAIT_TIMEOUT_S"
            )


def check_ends(processes: Processes) -> None:
    """Kill a fork server that does not report a runner's end within `stall_timeout_s`.

    The server may have been stopped; or the kernel cannot end the runner, which waits for a dead
    disk.
    """
    late = time.monotonic() - settings().stall_timeout_s
    silent = [each for each in processes.runners.values() if each.ending_since < late]
    for runner in silent:
        runner.kill(runner.how or "it has closed its socket")
    if silent:
        processes.server.kill()


def extend(processes: Processes, lost_s: float) -> None:
    """Extend every deadline by the time that this process was stopped."""
    processes.server.since += lost_s
    for runner in processes.runners.values():
        runner.since += lost_s
        runner.active_at += lost_s
        runner.ending_since += lost_s
