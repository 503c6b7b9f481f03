"""Every item of a map has one result or one error, whichever processes end."""

import itertools
import os
import random
import resource
import signal
import sys
import threading
import time

import cloudpickle
import numpy as np
import pytest
import torch
from children import limited
from watching import Watched

import shmload
from shmload.integrations.dataprep import processes

# Else the processes would import this module, and with it torch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def same(pipe, item):
    return item


def pids_of(pipe, item):
    return os.getpid(), os.getppid()


def test_results_come_in_the_order_of_the_items(job):
    def wait(pipe, item):
        time.sleep(0.02 if item == 0 else 0)
        return item

    made = job()
    assert list(made.map(wait, range(20))) == [*range(20)]
    assert sorted(made.map(wait, range(20), ordered=False)) == [*range(20)]


def test_items_may_be_endless_and_few_results_wait_for_an_earlier_one(job):
    def wait(pipe, item):
        time.sleep(0.3 if item == 0 else 0)  # in which thousands of others could be computed
        return item

    taken = []
    items = (taken.append(number) or number for number in itertools.count())
    found = job().map(wait, items)
    assert list(itertools.islice(found, 5)) == [*range(5)]
    found.close()
    assert len(taken) < 100


def test_another_function_gets_one_item_at_first(job):
    made = job(procs=1)
    assert len(list(made.map(same, range(500)))) == 500  # many at once in the end
    taken = []
    items = (taken.append(number) or number for number in range(100))
    found = made.map(pids_of, items)
    next(found)
    assert len(taken) < 10
    found.close()


def test_error_of_an_item_names_it_and_has_its_cause_and_traceback(job):
    def fail(pipe, item):
        return 1 / item

    with pytest.raises(shmload.ItemFailed, match=r"item 1, 0: ZeroDivisionError: ") as caught:
        list(job().map(fail, [2, 0, 1]))
    assert (caught.value.index, caught.value.item) == (1, 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in fail" in caught.value.__cause__.__notes__[0]


class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(one)
        self.other = threading.Lock()


def refuse(value):
    raise ValueError(f"not {value}")


class Unloadable:
    def __reduce__(self):
        return refuse, ("loaded",)


def test_failures_of_items_stand_in_their_places(job):
    def work(pipe, item):
        match item:
            case "odd":
                raise Odd("one", "other")
            case "exit":
                sys.exit(5)
            case "lock":
                return threading.Lock()
            case "unloadable":
                return Unloadable()
        return item

    items = ["odd", "exit", "lock", "unloadable", Unloadable(), threading.Lock(), 3]
    *failed, last = job().map(work, items, errors="pass")
    assert last == 3
    lock, unloadable = "cannot pickle '_thread.lock'", "ValueError: not loaded"
    said = ["RuntimeError: Odd: one", "SystemExit: 5", lock, unloadable, unloadable, lock]
    for error, text in zip(failed, said, strict=True):
        assert isinstance(error, shmload.ItemFailed)
        assert text in error.reason


def test_errors_of_the_items_iterator_come_out(job):
    def items():
        yield 1
        raise LookupError("no more")

    made = job()
    with pytest.raises(LookupError, match="no more"):
        list(made.map(same, items()))
    assert list(made.map(same, [1])) == [1]


def test_arguments_are_checked(job):
    for wrong, said in [({"procs": 0}, "procs is 0"), ({"threads": 0}, "threads is 0")]:
        with pytest.raises(shmload.ArgumentError, match=said):
            job(**wrong)
    with pytest.raises(shmload.ArgumentError, match="do not give dtype"):
        job(dtype="bfloat16")
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        list(job().map(lambda pipe, item: lock, [1]))


# Deaths -------------------------------------------------------------------------------------------


def test_item_at_which_a_process_dies_is_done_again(job, first_time):
    def die_once(pipe, item):
        if item == 7 and first_time("death"):
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert list(job().map(die_once, range(20))) == [*range(20)]


def test_item_at_which_three_processes_die_is_named(job):
    def die(pipe, item):
        if item == 3:
            os._exit(9)
        return item

    made = job()
    found = list(made.map(die, range(6), errors="pass"))
    assert found[:3] + found[4:] == [0, 1, 2, 4, 5]
    assert isinstance(found[3], shmload.ItemFailed)
    assert found[3].endings == ("exit code 9",) * 3
    with pytest.raises(shmload.ItemFailed, match=r"^item 3, 3: 3 processes ended at it"):
        list(made.map(die, range(6)))


def test_process_that_dies_in_a_message_while_its_child_has_the_socket(
    job, first_time, tmp_path, monkeypatch
):
    fifo = str(tmp_path / "pids")
    os.mkfifo(fifo)

    def die_in_a_message(pipe, item):
        if item == 1 and first_time("death"):
            if not (child := os.fork()):
                signal.alarm(20)
                signal.pause()
            with open(fifo, "w") as file:  # waits for the reader
                file.write(f"{os.getpid()} {child}")
            signal.alarm(1)  # kills it while it sends
            return bytes(10 << 20)
        return item

    monkeypatch.setattr(processes, "_STUCK_S", 1)
    made = job()
    list(made.map(same, range(2)))  # so both processes are ready
    found = made.map(die_in_a_message, range(4), ordered=False)
    assert next(found) == 0  # nothing is read until the next
    with open(fifo) as file:
        pid, child = map(int, file.read().split())
    Watched([pid]).wait_for_the_end()
    began = time.monotonic()
    try:
        assert sorted(found) == [1, 2, 3]
        assert time.monotonic() - began < 10  # before its child ends
    finally:
        os.kill(child, signal.SIGKILL)


def test_stopped_process_that_gets_a_large_item_is_replaced(job, monkeypatch):
    monkeypatch.setattr(processes, "_STUCK_S", 1)
    made = job(procs=1)
    ((pid, _),) = made.map(pids_of, [0])
    os.kill(pid, signal.SIGSTOP)
    assert [*made.map(lambda pipe, item: len(item), [bytes(10 << 20)])] == [10 << 20]


def test_job_is_closed_when_no_descriptor_is_free(job):
    made = job(procs=1)
    (pids,) = made.map(pids_of, [0])
    watched = Watched(pids)
    with limited(resource.RLIMIT_NOFILE, 1):
        made.close()
    watched.wait_for_the_end()


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        ("RLIMIT_NOFILE", lambda: os.dup(0) + 4),
        ("RLIMIT_FSIZE", lambda: 1 << 30),
        ("RLIMIT_AS", lambda: 100 << 30),  # the first process took 64
    ],
)
def test_limit_that_forbids_a_process_is_named(job, limit, allowed):
    made = job()
    assert list(made.map(same, [0])) == [0]  # in the first process
    said = f"{limit} is .*; raise it with `ulimit"
    number = getattr(resource, limit)
    with limited(number, allowed()), pytest.raises(shmload.CapacityError, match=said):
        list(made.map(same, [0, 1]))
    assert list(made.map(same, [0, 1])) == [0, 1]


@pytest.mark.slow
def test_hung_item_is_ended_after_the_timeout(job, first_time):
    def hang_once(pipe, item):
        if item == 1 and first_time("hang"):
            signal.pause()
        return item

    assert list(job(timeout_s=3).map(hang_once, range(4))) == [*range(4)]


@pytest.mark.parametrize("place", [0, 1], ids=["process", "fork server"])
def test_idle_process_that_dies_is_replaced(job, place):
    made = job(procs=1)
    (pids,) = made.map(pids_of, [0])
    watched = Watched([pids[place]])
    os.kill(pids[place], signal.SIGKILL)
    watched.wait_for_the_end()
    (others,) = made.map(pids_of, [0])
    assert others[place] != pids[place]


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("import os; os._exit(7)", shmload.JobError, "ended before it could work"),
        ("import no_such_module", ModuleNotFoundError, "no_such_module"),
        (
            "from threading import *; Thread(target=Event().wait, daemon=True).start()",
            shmload.JobError,
            "left the threads Thread-1",
        ),
    ],
)
def test_module_that_cannot_be_preloaded_is_the_error(
    job, tmp_path, monkeypatch, code, error, said
):
    (tmp_path / "preloaded.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=said):
        list(job(preload=["preloaded"]).map(same, [1]))


def test_thread_of_a_preloaded_module_may_be_ending(job, tmp_path, monkeypatch):
    (tmp_path / "preloaded.py").write_text("from threading import *; Timer(0.1, int).start()")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(job(preload=["preloaded"]).map(same, [1])) == [1]


def test_threads_are_those_of_torch_whenever_it_is_imported(job):
    def threads(pipe, item):
        was_there = "torch" in sys.modules
        import torch

        return was_there, torch.get_num_threads()

    assert list(job(threads=2).map(threads, [0])) == [(False, 2)]
    assert list(job(threads=2, preload=["torch"]).map(threads, [0])) == [(True, 2)]


def test_bars_of_a_function_start_no_thread(job):
    def show(pipe, item):
        from tqdm import tqdm

        return list(tqdm([item], disable=False)), threading.active_count()

    assert list(job().map(show, [7])) == [([7], 1)]


# Uses ---------------------------------------------------------------------------------------------


def test_map_that_is_given_up_leaves_a_job_that_works(job):
    made = job()
    for found in made.map(lambda pipe, item: time.sleep(3600 * (item > 3)) or item, range(9)):
        if found == 2:
            break
    assert list(made.map(same, range(3))) == [*range(3)]


def test_job_that_is_closed_or_in_use_is_refused(job):
    made = job()
    begun = made.map(same, range(100))
    next(begun)
    with pytest.raises(shmload.ArgumentError, match="at another map"):
        next(made.map(same, [1]))
    made.close()
    made.close()
    for found in (begun, made.map(same, [1])):
        with pytest.raises(shmload.ArgumentError, match="is closed"):
            list(found)


def test_job_in_a_forked_child_is_refused_and_goes_on_in_the_parent(job):
    made = job()
    list(made.map(same, [1]))
    pid = os.fork()
    if pid == 0:
        try:
            list(made.map(same, [1]))
        except shmload.ArgumentError as error:
            made.close()
            os._exit(0 if "belongs to process" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert list(made.map(same, [1])) == [1]


def test_function_may_print_and_fork(job, capfd):
    def work(pipe, item):
        print("said", item)
        pid = os.fork()  # both return
        if pid:
            os.waitpid(pid, 0)
        return item

    assert list(job().map(work, [1, 2])) == [1, 2]
    assert sorted(capfd.readouterr().out.split()) == ["1", "2", "said", "said"]


def test_random_numbers_depend_on_the_item_alone(job):
    def draw(pipe, item):
        return random.random(), np.random.rand(), torch.rand(1).item()

    found = list(job(preload=["torch"]).map(draw, range(5)))
    assert len(set(found)) == 5
    assert list(job(procs=1, preload=["torch"]).map(draw, range(5))) == found
    assert list(job(procs=1, preload=["torch"], seed=1).map(draw, range(5))) != found


def test_tensors_and_arrays_cross_as_they_are(job):
    made = job(preload=["torch"])
    for shape in [(), (0,), (2, 3), (600, 700)]:
        tensors = [
            torch.ones(shape, dtype=torch.bfloat16),
            torch.zeros((*shape, 4), dtype=torch.int8)[..., ::2],
            torch.nn.Parameter(torch.ones(shape)),
        ]
        for got, wanted in zip(made.map(same, tensors), tensors, strict=True):
            assert torch.equal(got, wanted.detach())
            assert (got.dtype, got.requires_grad) == (wanted.dtype, False)
            got.add_(1)  # it is writable
    view = torch.zeros(1 << 24)[:10]
    assert [*made.map(lambda pipe, item: item.untyped_storage().nbytes(), [view])] == [40]


def test_results_of_any_size_and_number_have_their_bytes(job):
    """Small ones, those of several buffers, and those that make the shared memory larger."""

    def make(pipe, item):
        import numpy as np

        draw = np.random.default_rng(item)
        return [
            draw.bytes(1000),
            *(draw.random(draw.integers(1, 400_000)) for _ in range(item % 4)),
        ]

    for number, found in enumerate(job().map(make, range(300))):
        for got, wanted in zip(found, make(None, number), strict=True):
            assert np.array_equal(got, wanted)


# Progress -----------------------------------------------------------------------------------------


def test_progress_is_shown_when_asked_and_on_terminals(job, capfd):
    list(job().map(same, range(10)))
    assert capfd.readouterr().err == ""
    list(job().map(same, range(10), progress=True))
    assert "10/10" in capfd.readouterr().err
