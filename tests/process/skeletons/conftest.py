"""What the tests of the judge have in common: a load to examine, and code in a library's class."""

import sys

import diffusers
import pytest
import torch

import shmload
from shmload._building import build, examining, snapshot

_HOME = sys.modules[diffusers.AutoencoderKL.__module__]


@pytest.fixture
def examined(saved, configure, tmp_path, monkeypatch):
    """Return what the judge makes of a load of a model in a dtype; it looks at one module."""
    configure(skeletons=1, cache_dir=tmp_path / "cache")
    asked = []
    monkeypatch.setattr(build, "ask", asked.append)
    source = saved("stable-diffusion")
    # Here, before anything is planted: the judge's process has loaded nothing.
    for dtype in ("bfloat16", "float16", "float32"):
        shmload.load_model("AutoencoderKL", source, subfolder="vae", dtype=dtype)
    requests = {request.dtype: request for request in asked}
    look = snapshot.Snapshot
    monkeypatch.setattr(examining, "Snapshot", lambda *_: look({_HOME.__name__: _HOME}))
    return lambda dtype: examining.examine(requests[dtype])


@pytest.fixture
def plant(monkeypatch):
    """Let the constructor of a class run some code, as if the library had it."""

    def change(code):
        held = vars(_HOME)
        plain = diffusers.AutoencoderKL.__init__
        added = {"table": [], "registry": {}, "counter": iter(range(99)), "torch": torch}
        for name, value in {**added, "plain_init": plain}.items():
            monkeypatch.setitem(held, name, value)
        source = (
            "def other(self):\n    table.append(1)\n"
            "def same(self):\n    pass\n"
            f"def __init__(self, *a, **k):\n    plain_init(self, *a, **k)\n    {code}\n"
        )
        made = {}
        exec(compile(source, _HOME.__file__, "exec"), held, made)
        for name in ("other", "same"):
            monkeypatch.setitem(held, name, made[name])
        made["__init__"].__wrapped__ = plain
        monkeypatch.setattr(diffusers.AutoencoderKL, "__init__", made["__init__"])

    return change
