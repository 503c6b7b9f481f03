"""Several pipelines share a budget: what is needed is there, and no more than fits."""

import asyncio
import contextlib
import threading
import weakref

import pytest
import torch
from comparing import assert_equal, reference
from mappings import copied_nbytes
from pipelines import save

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

NAMES = "a", "b", "c"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three pipelines of one kind, which have no file in common."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(save("stable-diffusion", folder / name, seed=number))
        for number, name in enumerate(NAMES)
    }


@pytest.fixture
def size(sources):
    """How much one of them takes in shared memory, in bytes."""
    return shmload.plan(sources["a"], keep=True).decode_nbytes


@pytest.fixture
def room(size):
    """Return a budget for so many of them; a little is for buffers that no file has."""
    return lambda count: int(size * (count + 0.1))


@pytest.fixture
def made(configure):
    """Make switchers that are closed with the test, and remember what they load, as by default."""
    configure(remember=1)
    with contextlib.ExitStack() as closing:
        yield lambda *args, **kwargs: closing.enter_context(
            shmload.Switcher(*args, **{"progress": False} | kwargs)
        )


def resident():
    """How much lies in shared memory, in bytes."""
    return sum(info.nbytes for info in shmload.segments())


# One thread ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pipeline_is_what_the_library_loads_and_stays_the_same_object(made, sources):
    switcher = made(sources, "1GiB")
    with switcher.use("a") as pipe:
        assert_equal(pipe, reference(sources["a"]))
        assert copied_nbytes(pipe) == 0
    first = weakref.ref(pipe)
    with switcher.use("b"):
        pass
    with switcher.use("a") as pipe:
        assert pipe is first()
    figures = switcher.figures
    assert (figures.hits, figures.loads, figures.given_up) == (1, 2, 0)


def test_least_recently_used_goes_with_its_memory(made, sources, size, room):
    switcher = made(sources, room(2))
    for name in "aba":
        with switcher.use(name):
            pass
    with switcher.use("c"):
        built = [info.nbytes for info in shmload.segments() if info.kept]
        assert len(built) == 2
        assert resident() == 2 * size + sum(built)
        assert switcher.figures.held_nbytes <= room(2)
    with switcher.use("a"):
        pass
    figures = switcher.figures
    assert (figures.loads, figures.given_up) == (3, 1)  # a was used after b, so b went


def test_larger_than_the_budget_is_refused_and_nothing_else_goes(made, sources, size, room):
    models = {"small": {"source": sources["a"], "components": ["vae"]}, "large": sources["b"]}
    switcher = made(models, room(0.8))
    with switcher.use("small"):
        pass
    before = resident()
    for _ in range(2):
        with pytest.raises(shmload.DoesNotFit, match="budget") as caught, switcher.use("large"):
            pass
        assert caught.value.needed >= size
        assert caught.value.available == room(0.8)
    assert resident() == before
    assert switcher.figures.loads == 2  # the second time its size was known
    with switcher.use("small"):
        pass
    assert switcher.figures.loads == 2


# Several threads ----------------------------------------------------------------------------------


def note_waits(switcher, note):
    """Call a function each time that a use begins to wait for the end of another."""
    wait_for = switcher._changed.wait_for

    def wait(is_over, *args):
        if not is_over():
            note()
        return wait_for(is_over, *args)

    switcher._changed.wait_for = wait


def test_tasks_use_a_pipeline_in_turn_and_leave_threads_for_the_one_that_works(made, sources):
    switcher = made(sources, "1GiB")
    inside = threading.Lock()

    def work_alone():
        assert inside.acquire(blocking=False)
        sum(range(20_000))
        inside.release()

    async def work():
        async with switcher.use("a"):
            await asyncio.to_thread(work_alone)

    async def work_at_once():
        await asyncio.gather(*(work() for _ in range(40)))  # more than the loop's own threads

    asyncio.run(asyncio.wait_for(work_at_once(), 60))
    assert switcher.figures.hits == 39


def test_task_that_is_cancelled_while_it_waits_has_nothing(made, sources):
    switcher = made(sources, "1GiB")

    async def wait_in_vain():
        async with switcher.use("a"):
            raise AssertionError

    async def cancel():
        waits = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with switcher.use("a"):
            note_waits(switcher, lambda: loop.call_soon_threadsafe(waits.set))
            task = asyncio.create_task(wait_in_vain())
            await waits.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with switcher.use("a"):
            pass

    asyncio.run(cancel())


# Arguments, ends ----------------------------------------------------------------------------------


def test_arguments_of_one_model_come_before_those_of_all(made, sources):
    models = {"a": {"source": sources["a"], "dtype": "float16"}, "b": sources["b"]}
    switcher = made(models, "1GiB", dtype="bfloat16")
    with switcher.use("a") as a, switcher.use("b") as b:
        assert (a.unet.dtype, b.unet.dtype) == (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("models", "budget", "given", "said"),
    [
        ({"a": {}}, "1GiB", {}, "no source"),
        ({"a": "x"}, "1GiB", {"keep": False}, "keep"),
        ({"a": "x"}, "1GiB", {"device_budget": "1GiB"}, "needs a device"),
        ("a", "1GiB", {}, "list of sources"),
        ({"a": {"source": "shm:a", "loras": ["x"]}}, "1GiB", {}, "shm:a"),
        ({"a": {"source": "x", "device_map": "cpu"}}, "1GiB", {}, "device_map"),
    ],
)
def test_wrong_arguments_are_refused(models, budget, given, said):
    with pytest.raises(shmload.ArgumentError, match=said):
        shmload.Switcher(models, budget, **given)


def test_errors_of_a_load_leave_the_switcher_usable(made, sources, tmp_path):
    switcher = made({**sources, "none": str(tmp_path / "none")}, "1GiB")
    with pytest.raises(shmload.SourceNotFound), switcher.use("none"):
        pass
    with pytest.raises(shmload.ArgumentError, match="did you mean"), switcher.use("nona"):
        pass
    with pytest.raises(RuntimeError), switcher.use("a"):
        raise RuntimeError
    with switcher.use("a"):
        pass


def test_pipeline_in_use_goes_after_its_use_when_the_switcher_is_closed(sources):
    switcher = shmload.Switcher(sources, "1GiB", progress=False)
    with switcher.use("a") as pipe:
        switcher.close()
        assert pipe.unet is not None
    with pytest.raises(AttributeError):
        _ = pipe.unet


def test_reload_takes_the_newest_version(made):
    model = torch.nn.Linear(4, 4)
    shmload.publish(model, "linear")
    switcher = made({"linear": "shm:linear"}, "1GiB")
    with switcher.use("linear"):
        pass
    with torch.no_grad():
        model.weight.add_(1)
    shmload.publish(model, "linear")
    switcher.reload("linear")
    with switcher.use("linear") as second:
        assert torch.equal(second.weight, model.weight)
