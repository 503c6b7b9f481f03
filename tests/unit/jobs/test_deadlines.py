"""A job's processes start and end in time, and a pause of the job's own process is not theirs."""

import socket
import time
from types import SimpleNamespace

import pytest

from shmload._settings import settings
from shmload.errors import JobFailed
from shmload.integrations._jobs.deadlines import check_ends, check_starts, extend
from shmload.integrations._jobs.runner_process import RunnerProcess

LATE_S = 1e6


@pytest.fixture
def processes():
    """A fork server and a runner that have just started, in place of real ones."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        runner = RunnerProcess(0, ours)
        runner.is_started = True
        kills = []
        server = SimpleNamespace(
            is_prepared=True, since=time.monotonic(), kill=lambda: kills.append("server")
        )
        yield SimpleNamespace(server=server, runners={0: runner}, kills=kills)


def start_server_late(processes):
    processes.server.is_prepared = False
    processes.server.since -= LATE_S


def start_runner_late(processes):
    runner = processes.runners[0]
    runner.is_started = False
    runner.since -= LATE_S


def end_runner_late(processes):
    runner = processes.runners[0]
    runner.expect_end()
    runner.ending_since -= LATE_S


@pytest.mark.parametrize("start_late", [start_server_late, start_runner_late])
def test_process_that_does_not_start_in_time_is_refused(processes, start_late):
    check_starts(processes)
    start_late(processes)
    with pytest.raises(JobFailed, match=f"within {settings().wait_timeout_s:g} s"):
        check_starts(processes)


def test_server_that_does_not_report_an_end_in_time_is_killed(processes):
    processes.runners[0].expect_end()
    check_ends(processes)
    assert processes.kills == []
    end_runner_late(processes)
    check_ends(processes)
    assert processes.kills == ["server"]
    assert processes.runners[0].how == "it has closed its socket"


@pytest.mark.parametrize("be_late", [start_server_late, start_runner_late, end_runner_late])
def test_pause_of_this_process_makes_no_other_late(processes, be_late):
    be_late(processes)
    extend(processes, LATE_S)
    check_starts(processes)
    check_ends(processes)
    assert processes.kills == []


def test_pause_of_this_process_is_no_idle_time_of_a_runner(processes):
    runner = processes.runners[0]
    runner.since -= LATE_S
    runner.active_at -= LATE_S
    extend(processes, LATE_S)
    assert runner.idle_s() < LATE_S / 2
