"""What a switcher does while another use loads, frees or waits; the pipelines are plain modules."""

import contextlib
import os
import threading

import pytest
import torch

import shmload
from shmload.integrations import switching

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

        def make(budget, device_budget=None, **loads):
            nbytes = int((budget + 0.5) * _NBYTES)
            switcher = shmload.Switcher({name: f"no/{name}" for name in loads}, nbytes)
            for name, load in loads.items():
                switcher._models[name].load = load
            if device_budget is not None:  # the device is the host: nothing moves
                switcher._device = "cpu"
                switcher._budgets["device_budget"] = int((device_budget + 0.5) * _NBYTES)
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


class Pause:
    """What stops the thread that calls it, until the test goes on."""

    def __init__(self):
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs):
        self.is_there.set()
        assert self.may_go.wait(_WAIT_S)
        return module()


def test_model_too_large_for_the_device_takes_no_room_on_the_host(made):
    switcher = made(3, device_budget=2, a=module, large=lambda: module(3))
    use(switcher, "a")
    for _ in range(2):
        with (
            pytest.raises(shmload.NoRoom, match="device_budget is") as caught,
            switcher.use("large"),
        ):
            pass
        assert caught.value.needed == 3 * _NBYTES
        assert switcher.figures.held_nbytes == _NBYTES
    use(switcher, "a")
    figures = switcher.figures
    assert (figures.hits, figures.loads) == (1, 2)  # the second time its size was known


def test_none_goes_for_a_model_that_would_not_fit_beside_those_in_use(made, configure):
    configure(wait_timeout_s=0.05)
    switcher = made(3, a=module, b=module, c=lambda: module(3))
    with pytest.raises(shmload.SwitchTimeout), switcher.use("b"):
        use(switcher, "a", "c")
    assert switcher.figures.given_up == 1  # c itself, which was larger than was known
    use(switcher, "a")
    assert switcher.figures.loads == 3


def test_others_are_used_while_a_pipeline_is_given_up(made, monkeypatch):
    switcher = made(2, a=module, b=module, c=module)
    use(switcher, "a", "b")
    removal = Pause()
    monkeypatch.setattr(switching, "remove_idle", removal)
    with running(lambda: use(switcher, "c")):
        assert removal.is_there.wait(_WAIT_S)
        with running(lambda: use(switcher, "b")):
            pass
        assert switcher.figures.hits == 1
        removal.may_go.set()
    assert switcher.figures.loads == 3


def test_what_goes_is_used_again_after_it_has_gone(made, monkeypatch):
    switcher = made(2, a=module, b=module, c=module)
    use(switcher, "a", "b")
    removal, begun = Pause(), threading.Event()
    monkeypatch.setattr(switching, "remove_idle", removal)
    wait_for = switcher._changed.wait_for

    def wait(is_over, *args):
        if not is_over():
            begun.set()
        return wait_for(is_over, *args)

    with running(lambda: use(switcher, "c")):
        assert removal.is_there.wait(_WAIT_S)
        switcher._changed.wait_for = wait
        with running(lambda: use(switcher, "a")):
            assert begun.wait(_WAIT_S)
            removal.may_go.set()
    assert switcher.figures.loads == 4


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


def test_models_of_known_sizes_load_while_another_loads(made):
    load = Pause()
    switcher = made(2, a=module, b=module, slow=load)
    use(switcher, "a", "b")
    switcher.reload("a")
    switcher._models["a"].sizes = {"budget": {"a": _NBYTES}}
    with running(lambda: use(switcher, "slow")):
        assert load.is_there.wait(_WAIT_S)
        with running(lambda: use(switcher, "a")):  # b goes
            pass
        load.may_go.set()
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


def test_failed_load_leaves_its_room_to_others(made):
    def load():
        raise OSError

    switcher = made(1, a=load, b=module)
    for _ in range(2):
        with pytest.raises(OSError), switcher.use("a"):  # noqa: PT011
            pass
        assert switcher.figures.held_nbytes == 0
    use(switcher, "b")


def test_failed_move_leaves_the_model_on_the_host(made):
    places = []

    class Full(torch.nn.Linear):
        def to(self, place):
            places.append(place)
            if len(places) == 1:
                raise MemoryError

    switcher = made(1, device_budget=1, a=lambda: Full(_NBYTES // 4, 1, bias=False))
    switcher._device = "there"
    with pytest.raises(MemoryError), switcher.use("a"):
        pass
    use(switcher, "a")
    assert places == ["there", "cpu", "there"]
    assert switcher.figures.loads == 1


def test_child_that_is_forked_in_a_block_begins_without_uses(made):
    switcher = made(1, a=module, b=module)
    with switcher.use("a"):
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                use(switcher, "b", "a")
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_end_of_the_parents_block_ends_no_use_of_the_child(made):
    switcher = made(1, a=module)
    parents = switcher.use("a")
    parents.__enter__()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            own = switcher.use("a")
            own.__enter__()
            parents.__exit__()
            code = 0 if switcher._models["a"].user is own else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    parents.__exit__()


def test_pipeline_in_use_goes_with_its_block_when_another_thread_closes(made):
    switcher = made(1, a=module)
    with switcher.use("a") as pipe:
        with running(switcher.close):
            pass
        assert vars(pipe)
    assert not vars(pipe)
    assert switcher.figures.given_up == 1


def test_reload_forgets_the_size(made):
    sizes = [3, 1]
    switcher = made(2, a=lambda: module(sizes.pop(0)))
    for _ in range(2):
        with pytest.raises(shmload.NoRoom), switcher.use("a"):
            pass
    switcher.reload("a")
    use(switcher, "a")


def test_no_use_is_lost_in_the_figures(made):
    switcher = made(4, **dict.fromkeys("abcd", module))
    use(switcher, *"abcd")
    with contextlib.ExitStack() as all_of_them:
        for name in "abcd":
            all_of_them.enter_context(running(lambda name=name: use(switcher, *name * 500)))
    assert switcher.figures.hits == 2000
