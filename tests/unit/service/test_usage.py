"""What the service counts for each model, and that it forgets models rather than grow."""

import pytest

from shmload._segments.roots import Root
from shmload._service.metrics import MAX_MODELS, Usage


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


def test_hits_and_misses_are_counted_by_model(usage):
    usage.note(Root(path="org/a"), hits=2, misses=1)
    usage.note(Root(path="org/b"), hits=0, misses=3)
    usage.note(Root(path="org/a"), hits=1, misses=0)
    assert (use_of(usage, "org/a").hits, use_of(usage, "org/a").misses) == (3, 1)
    assert (use_of(usage, "org/b").hits, use_of(usage, "org/b").misses) == (0, 3)
    sums = usage.sums()
    assert (sums["hits"], sums["misses"]) == (3, 4)


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


# Names --------------------------------------------------------------------------------------------


def names_in(usage):
    return [use.model for use in usage.models()]


def test_models_of_one_name_are_told_apart_everywhere(usage, clock):
    a, b = Root(path="/models/team-a/sd"), Root(path="/models/team-b/sd")
    usage.note(a, hits=1, misses=0)
    assert names_in(usage) == ["sd"]
    assert usage.name_of(b) == "team-b/sd"
    usage.note(b, hits=1, misses=0)
    assert names_in(usage) == ["team-b/sd", "team-a/sd"]


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
