"""After a map is abandoned, interrupted, paused or given bad values, the next map works."""

import os
import signal
import threading

import pytest
from light_jobs import notes, pids_of, same, wait_readable

import shmload
from shmload._jobs import crew, maps, processes

pytestmark = pytest.mark.slow


@pytest.fixture
def job(light_job):
    return light_job()


# Ends of maps -------------------------------------------------------------------------------------


def fail_at(number):
    def call(pipe, item):
        if item == number:
            raise LookupError(f"{number} is not there")
        return item

    return call


def test_error_that_the_caller_keeps_does_not_disturb_the_next_map(job):
    with pytest.raises(shmload.ItemFailed) as caught:
        list(job.map(fail_at(3), range(100)))
    results = job.map(same, range(100))
    assert next(results) == 0
    del caught  # frees the traceback and its frames
    assert list(results) == list(range(1, 100))


def test_end_of_a_map_is_not_waited_for(job, monkeypatch):
    monkeypatch.setattr(maps, "_POLL_S", 1000.0)
    for count in (0, 1, 2, 3, 4, 5):
        assert list(job.map(same, range(count))) == list(range(count))


def test_where_there_is_nothing_to_do_no_pipeline_is_waited_for(light_job):
    job = light_job(early="signal.sigwait([signal.SIGTERM])")
    assert list(job.map(same, [])) == []
    os.kill(job._crew._server.pid, signal.SIGTERM)


def test_items_end_with_an_error_and_results_before_it_come_out(job):
    def items():
        yield from range(5)
        raise OSError("the list ends here")

    for as_completed in (False, True):
        results = job.map(same, items(), as_completed=as_completed)
        assert sorted(next(results) for _ in range(5)) == list(range(5))
        with pytest.raises(OSError, match="ends here"):
            next(results)
    assert list(job.map(same, [1])) == [1]


class Interrupting:
    """Raises KeyboardInterrupt when it is unpickled."""

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGINT,)


@pytest.mark.parametrize("where", ["result", "items", "answer", "begin"])
def test_interrupted_map_does_not_disturb_the_next(job, monkeypatch, where):
    def items():
        for number in range(10):
            if where == "items" and number == 5:
                signal.raise_signal(signal.SIGINT)
            yield number

    def interrupting(pipe, item):
        return Interrupting() if where == "result" and item == 5 else item

    with monkeypatch.context() as patch:
        if where == "answer":
            hear = crew.Crew._hear

            def interrupted(crew, runner, events):
                hear(crew, runner, events)
                signal.raise_signal(signal.SIGINT)

            patch.setattr(crew.Crew, "_hear", interrupted)
        if where == "begin":
            pids_of(job)
            patch.setattr(
                processes.Runner,
                "post",
                lambda *args: signal.raise_signal(signal.SIGINT),
            )
        with pytest.raises(KeyboardInterrupt):
            list(job.map(interrupting, items()))
    assert list(job.map(same, range(100))) == list(range(100))


def test_map_that_was_interrupted_when_it_heard_of_an_end_does_not_disturb_the_next(
    job, monkeypatch
):
    def kill_the_other(pipe, pids):
        (other,) = set(pids) - {os.getpid()}
        os.kill(other, signal.SIGKILL)
        signal.pause()

    pids = pids_of(job)
    with monkeypatch.context() as patch:
        patch.setattr(crew.Crew, "_replace_ended", lambda *args: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            list(job.map(kill_the_other, [pids]))
    assert list(job.map(same, range(100))) == list(range(100))


def test_pipeline_that_could_not_be_loaded_is_loaded_again_by_the_next_map(light_job):
    job = light_job(
        """
        def fail(handle):
            if is_first():
                raise OSError("not now")
        Handle.load = fail
        """
    )
    with pytest.raises(OSError, match="not now"):
        list(job.map(same, range(3)))
    assert list(job.map(same, range(3))) == [0, 1, 2]
    assert notes(job.program) == ["start"] * 2


# Closing ------------------------------------------------------------------------------------------


def test_map_of_a_job_that_was_closed_meanwhile_is_an_error(job):
    results = job.map(same, range(100))
    next(results)
    job.close()
    job.close()
    with pytest.raises(shmload.ArgumentError, match="closed"):
        list(results)
    with pytest.raises(shmload.ArgumentError, match="closed"):
        list(job.map(same, [1]))


def test_job_can_be_closed_by_another_thread(light_job):
    job = light_job("run = lambda *args: (note('running'), time.sleep(1000))")
    caught = []

    def work():
        try:
            list(job.map(same, range(3)))
        except shmload.ArgumentError as exc:
            caught.append(str(exc))

    thread = threading.Thread(target=work)
    thread.start()
    while "running" not in notes(job.program):
        assert thread.is_alive()
    job.close()
    thread.join(20)
    assert not thread.is_alive()
    assert "closed" in caught[0]


def test_job_may_be_closed_while_its_items_are_taken(job):
    def items():
        yield from range(3)
        job.close()
        yield 3

    with pytest.raises(shmload.ArgumentError, match="closed"):
        list(job.map(same, items()))


def test_job_lives_on_when_the_thread_that_made_it_has_ended(light_job):
    made = []

    def make():
        job = light_job()
        made.append((job, pids_of(job)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    job, pids = made[0]
    assert pids_of(job) == pids


# Pauses -------------------------------------------------------------------------------------------


@pytest.fixture
def let_pass(monkeypatch):
    """Move this process's clock forward: `let_pass(seconds)`."""
    clock = processes.time
    offset = 0.0

    class Clock:
        @staticmethod
        def monotonic():
            return clock.monotonic() + offset

    def advance(seconds):
        nonlocal offset
        offset += seconds

    for module in (crew, maps, processes):
        monkeypatch.setattr(module, "time", Clock)
    return advance


def test_job_may_be_mapped_long_after_it_was_made(light_job, let_pass):
    job = light_job()
    wait_readable(job._crew._server.channel)  # it has reported "prepared", unread so far
    let_pass(10_000)
    assert list(job.map(same, range(3))) == [0, 1, 2]


def test_job_may_be_mapped_long_after_a_map_was_left(job, let_pass):
    pids_of(job)
    results = job.map(lambda pipe, item: item and signal.pause(), range(100))
    next(results)
    results.close()  # busy processes are replaced, unnoticed so far
    new = [runner for runner in job._crew.runners.values() if not runner.is_started]
    assert new
    wait_readable(*(runner.channel for runner in new))
    let_pass(10_000)
    assert list(job.map(same, range(3))) == [0, 1, 2]


def test_process_does_not_count_as_hung_while_the_caller_takes_no_results(light_job, let_pass):
    job = light_job(procs=1, item_timeout_s=100.0)
    results = job.map(lambda pipe, item: (os.getpid(), bytes(8 << 20)), range(4))
    pids = [next(results)[0]]
    for _ in range(3):
        (runner,) = job._crew.runners.values()
        wait_readable(runner.channel)  # the first bytes of a result larger than the socket's buffer
        let_pass(10_000)
        pids.append(next(results)[0])
    assert len(set(pids)) == 1


def test_time_in_which_the_job_itself_was_stopped_does_not_count(light_job, let_pass, tmp_path):
    """Ctrl-Z stops the job's processes too."""
    job = light_job(procs=1, item_timeout_s=100.0)
    (pid,) = pids_of(job)
    selector = job._crew._selector
    select = selector.select
    go = tmp_path / "go"

    def stopped(timeout_s):
        selector.select = select
        let_pass(10_000)
        go.touch()
        return []

    def wait(pipe, go):
        while not go.exists():
            pass
        return os.getpid()

    selector.select = stopped
    assert list(job.map(wait, [go])) == [pid]


def test_process_does_not_count_as_hung_while_its_item_waits_here(light_job, let_pass):
    job = light_job(procs=1, item_timeout_s=100.0)
    results = job.map(lambda pipe, item: os.getpid(), [bytes(8 << 20)] * 4)
    pids = [next(results)]
    for _ in range(3):
        let_pass(10_000)
        pids.append(next(results))
    assert len(set(pids)) == 1


def test_stopped_process_is_killed_though_its_item_does_not_fit_its_socket(light_job, monkeypatch):
    monkeypatch.setattr(maps, "_POLL_S", 0.1)
    job = light_job(procs=1, item_timeout_s=0.3)

    def stop(pipe, item):
        if item == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return len(item) if item else None

    got = list(job.map(stop, [0, bytes(8 << 20)]))
    assert isinstance(got[0], shmload.ItemKilled)
    assert got[1] == 8 << 20


# What cannot cross --------------------------------------------------------------------------------


def raise_anew():
    raise LookupError("it cannot be made here")


class OneWay:
    """Can be pickled but not unpickled."""

    def __reduce__(self):
        return raise_anew, ()


def test_result_that_cannot_be_unpickled_is_the_items_error(job):
    got = list(job.map(lambda pipe, item: OneWay() if item == 1 else item, range(4), errors="pass"))
    assert got[:1] + got[2:] == [0, 2, 3]
    assert isinstance(got[1], shmload.ItemFailed)
    assert "item 1, 1: LookupError: it cannot be made here" in str(got[1])


def test_item_that_cannot_be_pickled_stands_in_its_place(job):
    items = [0, 1, threading.Lock(), 3, threading.Lock(), 5]
    got = list(job.map(same, items, errors="pass"))
    assert [got[0], got[1], got[3], got[5]] == [0, 1, 3, 5]
    for number in (2, 4):
        assert isinstance(got[number], shmload.ItemFailed)
        assert got[number].index == number
        assert "<unlocked" in str(got[number])
        assert "cannot pickle" in str(got[number])
    assert len(pids_of(job)) == 2


def test_function_that_cannot_be_pickled_is_named(job):
    lock = threading.Lock()
    with pytest.raises(shmload.ArgumentError, match="the function cannot be sent"):
        list(job.map(lambda pipe, item: lock, [1]))
    assert list(job.map(same, [1])) == [1]


def test_unknown_word_for_errors_is_refused(job):
    with pytest.raises(shmload.ArgumentError, match="errors is 'ignore'"):
        list(job.map(same, [1], errors="ignore"))


def test_more_processes_than_descriptors_fit_a_message(light_job):
    job = light_job(procs=40)
    assert len(pids_of(job)) == 40
