"""Several pipelines share a budget: what is needed is there, and no more than fits."""

import contextlib
import gc
import random
import threading
import weakref

import diffusers
import pytest
import torch
from comparing import assert_equal, reference
from mappings import copied_nbytes
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from pipelines import build, run, save

import shmload
from shmload._building.shelf import choose
from shmload._building.turns import Entry

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


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    unet = build("stable-diffusion").unet
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    folder = tmp_path_factory.mktemp("lora")
    layers = get_peft_model_state_dict(unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)
    return folder / "pytorch_lora_weights.safetensors"


@pytest.fixture
def size(sources):
    """How much one of them takes in shared memory, in bytes."""
    return shmload.plan(sources["a"], keep=True).decode_nbytes


@pytest.fixture
def room(size):
    """Return a budget for so many of them; a little is for buffers that no file has."""
    return lambda count: int(size * (count + 0.1))


@pytest.fixture
def made():
    """Make switchers that are closed with the test."""
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
    assert (figures.uses, figures.hits, figures.loads, figures.given_up) == (3, 1, 2, 0)


def test_least_recently_used_goes_with_its_memory(made, sources, size, room):
    switcher = made(sources, room(2))
    for name in "aba":
        with switcher.use(name):
            pass
    with switcher.use("c"):
        assert resident() == 2 * size
        assert switcher.figures.held_nbytes <= room(2)
    with switcher.use("a"):
        pass
    figures = switcher.figures
    assert (figures.loads, figures.given_up) == (3, 1)  # a was used after b, so b went


@pytest.mark.slow
def test_what_comes_soon_goes_last(made, sources, size, room):
    switcher = made(sources, room(2))
    for name in "ab":
        with switcher.use(name):
            pass
    with switcher.use("c", then=["b", "a"]):  # b's use was later, and is sooner
        pass
    with switcher.use("b"):
        pass
    assert switcher.figures.loads == 3


def test_what_is_idle_in_memory_goes_too(made, sources, size, room):
    for source in sources.values():
        shmload.warm(source, progress=False)
    switcher = made(sources, room(2))
    with switcher.use("a"):
        assert switcher.figures.held_nbytes <= room(2)
        assert resident() == 2 * size


def test_what_is_pinned_stays_and_counts(made, sources, size, room):
    shmload.warm(sources["a"], pin=True, progress=False)
    switcher = made(sources, room(2))
    for name in "abc":
        with switcher.use(name):
            pass
    assert resident() == 2 * size
    with switcher.use("a"):
        pass
    smaller = made(sources, room(1))
    with pytest.raises(shmload.NoRoom, match="pinned"), smaller.use("a"), smaller.use("b"):
        pass


def test_larger_than_the_budget_is_refused_before_anything_moves(made, sources, size, room):
    small = {"small": sources["a"], "large": sources["b"]}
    switcher = made(small, room(1.5))
    with switcher.use("small"):
        pass
    before = resident()
    impossible = made(small, size // 2)
    with pytest.raises(shmload.NoRoom) as caught, impossible.use("large"):
        pass
    assert (caught.value.needed, caught.value.most) == (size, size // 2)
    assert resident() == before


def test_pipeline_that_went_is_empty(made, sources, room):
    switcher = made(sources, room(1))
    with switcher.use("a") as pipe:
        unet = weakref.ref(pipe.unet)
    with switcher.use("b"):
        assert unet() is None
        with pytest.raises(AttributeError, match="unet"):
            _ = pipe.unet


@pytest.mark.slow
def test_copy_that_the_program_keeps_counts(made, sources, size, room):
    switcher = made(sources, room(2))
    with switcher.use("a") as pipe:
        kept = pipe.unet
    del pipe
    with switcher.use("b"):
        pass
    with switcher.use("c"):  # a went first, and a part of it is still held: so b went too
        assert size < resident() <= switcher.figures.held_nbytes <= room(2)
        assert switcher.figures.given_up == 2
    wanted = reference(sources["a"]).unet.conv_in.weight
    assert torch.equal(kept.conv_in.weight, wanted)
    del kept
    gc.collect()
    with switcher.use("b"):
        assert resident() == 2 * size


@pytest.mark.slow
def test_shared_parts_count_once(made, saved, size):
    base = saved("stable-diffusion")
    pipe = shmload.load_pipeline(base, keep=True, progress=False)
    for name in "xy":
        with torch.no_grad():
            pipe.unet.conv_in.weight.add_(1)
        shmload.publish(pipe, name)
    del pipe
    gc.collect()
    switcher = made({"base": str(base), "x": "shm:x", "y": "shm:y"}, "1GiB")
    with switcher.use("base"), switcher.use("x"), switcher.use("y"):
        assert resident() <= switcher.figures.held_nbytes < resident() + size // 10


@pytest.mark.slow
def test_style_is_mixed_when_it_is_first_used_and_attached_later(made, sources, lora, size):
    models = {"plain": sources["a"], "ink": {"source": sources["a"], "loras": [(lora, 0.5)]}}
    wanted = reference(sources["a"])
    wanted.load_lora_weights(str(lora.parent), weight_name=lora.name)
    wanted.fuse_lora(lora_scale=0.5)
    wanted.unload_lora_weights()
    switcher = made(models, size * 5)
    for _ in range(2):
        with switcher.use("ink") as pipe:
            assert_equal(pipe, wanted)
            assert copied_nbytes(pipe) == 0
        with switcher.use("plain") as pipe:
            assert_equal(pipe, reference(sources["a"]))
    assert switcher.figures.loads == 2
    assert size < switcher.figures.held_nbytes < size * 2.5
    with pytest.raises(shmload.NoRoom), made(models, size).use("ink"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_random_switches_keep_the_bound_and_the_results(made, sources, size, number):
    wanted = {name: run(reference(source)) for name, source in sources.items()}
    budget = size * 9 // 5  # 60 %
    switcher = made(sources, budget)
    draws = random.Random(number)
    for _ in range(12):
        name = draws.choice(NAMES)
        with switcher.use(name) as pipe:
            assert resident() <= budget
            assert (run(pipe) == wanted[name]).all()
    assert switcher.figures.most_held_nbytes <= budget


# Several threads ----------------------------------------------------------------------------------


def test_one_pipeline_is_used_by_one_thread_at_a_time(made, sources):
    switcher = made(sources, "1GiB")
    inside = []
    overlaps = []

    def work():
        for _ in range(5):
            with switcher.use("a"):
                overlaps.append(bool(inside))
                inside.append(1)
                run_a_moment()
                inside.pop()

    def run_a_moment():
        sum(range(20_000))

    in_threads(work, work, work)
    assert not any(overlaps)
    assert switcher.figures.loads == 1


def test_what_is_used_does_not_go_and_is_waited_for(made, sources, size, room):
    switcher = made(sources, room(1))
    is_in, may_go, is_waiting = threading.Event(), threading.Event(), threading.Event()
    got = []
    wait_for = switcher._turns.changed.wait_for

    def note(*args):
        is_waiting.set()
        return wait_for(*args)

    switcher._turns.changed.wait_for = note

    def hold():
        with switcher.use("a") as pipe:
            is_in.set()
            assert may_go.wait(60)
            got.append(pipe.unet.conv_in.weight.sum().item())

    def want():
        with switcher.use("b"):
            got.append("b")

    holder, wanting = threading.Thread(target=hold), threading.Thread(target=want)
    holder.start()
    assert is_in.wait(60)
    wanting.start()
    assert is_waiting.wait(60)
    may_go.set()
    holder.join(60)
    wanting.join(60)
    assert got == [got[0], "b"]
    assert isinstance(got[0], float)
    assert switcher.figures.waits == 1


def test_two_that_wait_for_a_third_do_not_wait_for_each_other(made, sources, size, room):
    switcher = made(sources, room(1))
    is_in, may_go, waiting = threading.Event(), threading.Event(), threading.Semaphore(0)
    wait_for = switcher._turns.changed.wait_for

    def note(*args):
        waiting.release()
        return wait_for(*args)

    switcher._turns.changed.wait_for = note

    def hold():
        with switcher.use("c"):
            for name in "ab":  # by another program: idle
                shmload.warm(sources[name], progress=False)
            is_in.set()
            assert may_go.wait(60)

    def want(name):
        with switcher.use(name):
            pass

    threads = [threading.Thread(target=hold)]
    threads[0].start()
    assert is_in.wait(60)
    threads += [threading.Thread(target=want, args=(name,)) for name in "ab"]
    for thread in threads[1:]:
        thread.start()
    assert all(waiting.acquire(timeout=60) for _ in "ab")
    may_go.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_thread_does_not_wait_for_itself(made, sources, room):
    switcher = made(sources, room(1))
    with (
        switcher.use("a"),
        pytest.raises(shmload.ArgumentError, match="does not fit beside a"),
        switcher.use("b"),
    ):
        pass


def test_wait_ends_with_its_time(made, sources, room, configure):
    configure(wait_timeout_s=0.05)
    switcher = made(sources, room(1))
    errors = []

    def want():
        try:
            with switcher.use("b"):
                pass
        except shmload.SwitchTimeout as exc:
            errors.append(exc)

    with switcher.use("a"):
        in_threads(want)
    assert "a" in str(errors[0])


@pytest.mark.slow
def test_next_pipeline_is_loaded_while_this_one_runs(made, sources):
    switcher = made(sources, "1GiB")
    with switcher.use("a", then=["b"]), switcher._turns.changed:
        assert switcher._turns.changed.wait_for(lambda: switcher.figures.loads == 2, 60)
    switcher.prefetch("c")
    with switcher._turns.changed:
        assert switcher._turns.changed.wait_for(lambda: switcher.figures.loads == 3, 60)
    for name in NAMES:
        with switcher.use(name):
            pass
    assert switcher.figures.loads == 3


@pytest.mark.slow
def test_threads_that_want_all_of_them_all_get_them(made, sources, size, room):
    wanted = {name: reference(source).unet.conv_in.weight for name, source in sources.items()}
    switcher = made(sources, room(2))
    wrong = []

    def work(seed):
        draws = random.Random(seed)
        for _ in range(6):
            name = draws.choice(NAMES)
            with switcher.use(name, then=draws.choices(NAMES, k=2)) as pipe:
                if not torch.equal(pipe.unet.conv_in.weight, wanted[name]) or resident() > room(2):
                    wrong.append(name)

    in_threads(*(lambda seed=seed: work(seed) for seed in range(3)))
    assert not wrong
    assert switcher.figures.uses == 18


def in_threads(*functions):
    threads = [threading.Thread(target=each) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()


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
        ({"a": "x"}, "much", {}, "budget"),
        ({"a": "x"}, "1GiB", {"keep": False}, "keep"),
        ({"a": "x"}, "1GiB", {"device": "cpu"}, "device"),
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
    with switcher.use("a"), pytest.raises(shmload.ArgumentError, match="already"):
        switcher.use("a").__enter__()
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
    switcher.prefetch("b")
    assert switcher.figures.loads == 1


def test_reload_takes_the_newest_version(made):
    model = torch.nn.Linear(4, 4)
    shmload.publish(model, "linear")
    switcher = made({"linear": "shm:linear"}, "1GiB")
    with switcher.use("linear") as first, pytest.raises(shmload.UpdateRefused, match="reload"):
        shmload.update(first, "shm:linear")
    with torch.no_grad():
        model.weight.add_(1)
    shmload.publish(model, "linear")
    switcher.reload("linear")
    with switcher.use("linear") as second:
        assert torch.equal(second.weight, model.weight)


def test_what_another_publication_needs_stays_and_counts(made, sources, size, room):
    pipe = shmload.load_pipeline(sources["a"], keep=True, progress=False)
    shmload.publish(pipe, "other")
    del pipe
    gc.collect()
    switcher = made(sources, room(1))
    with switcher.use("a"):
        pass
    with pytest.raises(shmload.NoRoom, match="publication"), switcher.use("b"):
        pass
    assert switcher.figures.given_up == 0


def test_closed_switcher_keeps_nothing(sources):
    switcher = shmload.Switcher(sources, "1GiB", progress=False)
    with switcher.use("a") as pipe:
        gone = weakref.ref(pipe)
    del pipe
    switcher.close()
    switcher.close()
    assert gone() is None
    assert resident()
    with pytest.raises(shmload.ArgumentError, match="closed"), switcher.use("a"):
        pass


# Choosing -----------------------------------------------------------------------------------------


def entry(name):
    return Entry(name, dict, object)


@pytest.mark.parametrize(
    ("limit", "going"),
    [
        (90, ""),
        (80, "a"),
        (70, "b"),  # a need not go as well then
        (30, "ab"),
        (10, "abc"),
        (9, None),
    ],
)
def test_choice_takes_the_first_that_free_something(limit, going):
    order = [
        (entry("a"), {"t5": 20, "a": 10}),
        (entry("b"), {"b": 50}),
        (entry("c"), {"t5": 20, "c": 0}),
    ]
    found = choose(order, {"own": 10}, limit)
    assert found is None if going is None else [each.name for each in found] == list(going)
