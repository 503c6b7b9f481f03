"""What a switcher does while another use loads, frees or waits; the pipelines are plain modules."""

import contextlib
import os
import threading

import pytest
import torch

import shmload

pytestmark = pytest.mark.libraries

_WAIT_S = 60
_NBYTES = 4000


def module(units=1):
    """Return a model that takes so many units of memory."""
    return torch.nn.Linear(units * _NBYTES // 4, 1, bias=False)


@pytest.fixture
def made():
    """Make switchers over functions that load, with budgets in units."""
    with contextlib.ExitStack() as closing:

        def make(budget, **loads):
            nbytes = int((budget + 0.5) * _NBYTES)
            switcher = shmload.Switcher({name: f"no/{name}" for name in loads}, nbytes)
            for name, load in loads.items():
                switcher._models[name].load = load
            return closing.enter_context(switcher)

        yield make


@contextlib.contextmanager
def running(function):
    """Run a function in a thread, which ends with the block."""
    errors = []

    def run():
        try:
            function()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(_WAIT_S)
    assert not thread.is_alive()
    assert not errors


def use(switcher, *names):
    for name in names:
        with switcher.use(name):
            pass


def test_none_goes_for_a_model_that_would_not_fit_beside_those_in_use(made, configure):
    configure(wait_timeout_s=0.05)
    switcher = made(3, a=module, b=module, c=lambda: module(3))
    said = "c waited 0.05 s for b, which are in use"
    with pytest.raises(shmload.SegmentTimeout, match=said), switcher.use("b"):
        use(switcher, "a", "c")
    assert switcher.figures.given_up == 1  # c itself, which was larger than was known
    use(switcher, "a")
    assert switcher.figures.loads == 3


def test_others_load_while_a_use_waits_for_room(made):
    switcher = made(3, a=lambda: module(2), large=lambda: module(2), small=module)
    gone = threading.Event()
    give_up = switcher._give_up
    switcher._give_up = lambda *args, **kwargs: (give_up(*args, **kwargs), gone.set())
    with switcher.use("a"):
        waiting = running(lambda: use(switcher, "large"))
        waiting.__enter__()
        assert gone.wait(_WAIT_S)  # it does not fit: it waits for the end of a
        with running(lambda: use(switcher, "small")):
            pass
    waiting.__exit__(None, None, None)
    assert switcher.figures.loads == 4


def test_first_loads_take_turns(made):
    """What each takes is not known: together they could take many times the budget."""
    at_once = threading.Lock()

    def load():
        assert at_once.acquire(blocking=False)
        sum(range(20_000))
        at_once.release()
        return module()

    names = "abcdef"
    switcher = made(2, **dict.fromkeys(names, load))
    with contextlib.ExitStack() as all_of_them:
        for name in names:
            all_of_them.enter_context(running(lambda name=name: use(switcher, name)))
    assert switcher.figures.held_nbytes <= 2 * _NBYTES


def test_child_that_is_forked_in_a_block_begins_without_uses(made):
    """As of a server that loads its application before it forks its workers."""
    switcher = made(2, a=module, b=module)
    with switcher.use("a"):
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                use(switcher, "a", "b", "a")
                code = 0 if switcher.figures.loads == 2 else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
