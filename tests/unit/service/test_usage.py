"""What the service counts for each model, and that it forgets models rather than grow."""

import contextlib

import pytest

from shmload._segments.roots import Root
from shmload._service.metrics import BUCKETS_S, INTERVAL_S, MAX_MODELS, Usage


class Clock:
    """A clock that the test sets, in seconds."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def usage(clock):
    return Usage(clock)


def use_of(usage, model):
    (found,) = (use for use in usage.models() if use.source == model)
    return found


def decode_times(usage):
    """Return how many decodes took no longer, by model and bound."""
    return {
        (sample.labels["model"], sample.labels["le"]): sample.value
        for metric in usage.collect()
        for sample in metric.samples
        if sample.name == "shmload_model_decode_seconds_bucket"
    }


def test_hits_and_misses_are_counted_by_model(usage):
    usage.note(Root(path="org/a"), hits=2, misses=1)
    usage.note(Root(path="org/b"), hits=0, misses=3)
    usage.note(Root(path="org/a"), hits=1, misses=0)
    assert (use_of(usage, "org/a").hits, use_of(usage, "org/a").misses) == (3, 1)
    assert (use_of(usage, "org/b").hits, use_of(usage, "org/b").misses) == (0, 3)
    sums = usage.sums()
    assert (sums["hits"], sums["misses"]) == (3, 4)


def test_decode_is_listed_while_it_waits_and_runs_and_counted_at_its_end(usage, clock):
    with usage.decoding(Root(path="org/a"), 100) as running:
        (waiting,) = usage.running()
        assert (waiting.is_waiting, waiting.elapsed_s) == (True, 0)
        clock.now += 7
        running.begin()
        usage.add_read(running, 40)
        clock.now += 2
        (now,) = usage.running()
        assert (now.source, now.is_waiting) == ("org/a", False)
        assert (now.done_nbytes, now.total_nbytes, now.elapsed_s) == (40, 100, 2)
    assert usage.running() == ()
    use = use_of(usage, "org/a")
    assert (use.decodes, use.failed, use.read_nbytes, use.decode_s) == (1, 0, 40, 2)


def test_decode_that_fails_is_no_decode_time(usage, clock):
    with contextlib.suppress(OSError), usage.decoding(Root(path="org/a"), 100) as running:
        running.begin()
        clock.now += 2
        raise OSError
    use = use_of(usage, "org/a")
    assert (use.decodes, use.failed, use.decode_s) == (0, 1, 0)
    assert usage.sums()["decode_seconds"] == 2
    assert usage.running() == ()
    assert decode_times(usage) == {}


def test_decode_times_fall_into_buckets_whose_bounds_belong_to_them(usage, clock):
    for seconds in (BUCKETS_S[0], BUCKETS_S[1], BUCKETS_S[-1] + 1):
        with usage.decoding(Root(path="m"), 1) as running:
            clock.now = 0
            running.begin()
            clock.now = seconds
    found = decode_times(usage)
    counts = [found["m", str(bound)] for bound in (*BUCKETS_S, "+Inf")]
    assert counts == [1, *[2] * (len(BUCKETS_S) - 1), 3]
    assert use_of(usage, "m").decode_s == sum((BUCKETS_S[0], BUCKETS_S[1], BUCKETS_S[-1] + 1))


def test_models_that_were_used_least_recently_are_forgotten_and_sums_stay(usage):
    usage.note(Root(path="first"), hits=1, misses=0)
    usage.note(Root(path="second"), hits=1, misses=0)
    for number in range(MAX_MODELS - 2):
        usage.note(Root(path=f"model {number}"), hits=1, misses=0)
    usage.note(Root(path="first"), hits=1, misses=0)
    usage.note(Root(path="last"), hits=1, misses=0)
    found = [use.source for use in usage.models()]
    assert len(found) == MAX_MODELS
    assert found[:2] == ["last", "first"]
    assert "second" not in found
    assert usage.sums()["hits"] == MAX_MODELS + 2


def test_model_is_called_by_its_hub_id_or_last_folder(usage):
    usage.note(Root(path="/hub/x/snapshots/1", hub_id="org/a", revision="1"), hits=1, misses=0)
    usage.note(Root(path="/models/flux"), hits=1, misses=0)
    found = {use.source: use.model for use in usage.models()}
    assert found == {"/hub/x/snapshots/1": "org/a", "/models/flux": "flux"}


def test_long_name_keeps_its_end(usage):
    usage.note(Root(path="/a" * 5000 + "/" + "b" * 300), hits=1, misses=0)
    (use,) = usage.models()
    assert use.model == "…" + "b" * 199
    assert (use.source[0], len(use.source)) == ("…", 4096)


def test_history_has_the_bytes_of_each_spell(usage, clock):
    with usage.decoding(Root(path="m"), 100) as running:
        for nbytes in (10, 20):
            usage.add_read(running, nbytes)
        clock.now += 2 * INTERVAL_S
        usage.add_read(running, 5)
        clock.now += INTERVAL_S
    history = usage.history()
    assert len(history) == 60
    assert history[-4:] == (30, 0, 5, 0)
    clock.now += 1000 * INTERVAL_S
    assert set(usage.history()) == {0}


# Names --------------------------------------------------------------------------------------------


def names_in(usage):
    return [use.model for use in usage.models()]


def test_models_of_one_name_are_told_apart_everywhere(usage, clock):
    a, b = Root(path="/models/team-a/sd"), Root(path="/models/team-b/sd")
    usage.note(a, hits=1, misses=0)
    assert names_in(usage) == ["sd"]
    assert usage.name_of(b) == "team-b/sd"
    with usage.decoding(b, 10) as running:
        running.begin()
        assert [each.model for each in usage.running()] == ["team-b/sd"]
    assert names_in(usage) == ["team-b/sd", "team-a/sd"]
    assert {model for model, _ in decode_times(usage)} == {"team-b/sd"}


def test_resident_models_have_the_names_of_ls(clock):
    resident = [Root(path="/models/team-a/sd"), Root(path="/models/lora.safetensors")]
    usage = Usage(clock, lambda: resident)
    for path in ("/models/team-a/sd", "/models/team-b/sd"):
        usage.note(Root(path=path), hits=1, misses=0)
    assert names_in(usage) == ["team-b/sd", "sd"]


def test_variants_are_counted_apart(usage):
    usage.note(Root(path="/models/sd"), hits=1, misses=0)
    usage.note(Root(path="/models/sd", variant="fp16"), hits=0, misses=2)
    found = [(use.model, use.source, use.variant, use.misses) for use in usage.models()]
    assert found == [("sd:fp16", "/models/sd", "fp16", 2), ("sd", "/models/sd", "", 0)]
