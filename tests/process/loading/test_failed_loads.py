"""A failed load gives its memory back at once, also while its error is kept."""

import gc
import os
import weakref

import pytest
from accelerated import load
from diffusers import FluxPipeline

from shmload._building import placing
from shmload._host.procfs import mappings_below

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def no_collector():
    """Keep Python from collecting by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def models(monkeypatch):
    """Refer weakly to the transformers that are made, each of which refers to itself."""
    made = []
    init = FluxPipeline.__init__

    def note(pipe, *args, **kwargs):
        init(pipe, *args, **kwargs)
        pipe.transformer.__dict__["own"] = pipe.transformer
        made.append(weakref.ref(pipe.transformer))

    note.__wrapped__ = init  # diffusers reads its signature
    monkeypatch.setattr(FluxPipeline, "__init__", note)
    return made


def in_memory():
    """Return this process's mappings and descriptors of segments."""
    fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    return [*mappings_below("shmload"), *(path for path in fds if "shmload-" in path)]


def _is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


class Refusal(Exception):
    pass


def refuse(*_, **__):
    raise Refusal


@pytest.mark.parametrize("keep", [False, True])
def test_error_that_is_kept_keeps_no_memory(
    saved, accelerators, models, monkeypatch, shm_names, keep
):
    monkeypatch.setattr(placing, "attach_hooks", refuse)
    before = in_memory()
    with pytest.raises(Refusal) as caught:
        load(saved("flux"), device_map={"": "cpu", "vae": 0}, keep=keep)
    assert {model() for model in models} == {None}
    assert in_memory() == before
    assert shm_names() == []
    assert caught.value.__traceback__
