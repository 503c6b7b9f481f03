"""A class is looked at once; its other dtypes and checkpoints are compared without that."""

import logging
import sys

import diffusers
import pytest
import torch
from comparing import assert_loads_equal
from safetensors.torch import load_file, save_file

import shmload
from shmload._building import build, examining, proofs, snapshot
from shmload._host.memo import Memo

_HOME = sys.modules[diffusers.AutoencoderKL.__module__]


@pytest.fixture
def proved(monkeypatch):
    """The proofs that the judge has made."""
    made = []

    def write(memo, value):
        if isinstance(value, proofs.Proof):
            made.append(value)
        return plain(memo, value)

    plain = Memo.write
    monkeypatch.setattr(Memo, "write", write)
    return made


@pytest.mark.usefixtures("skeletons")
@pytest.mark.parametrize(("family", "looks"), [("stable-diffusion", 1), ("flux", 2)])
def test_five_dtypes_take_one_look(saved, skeletons, built, proved, family, looks):
    # In float16 transformers keeps weights of T5 in float32, by code that runs for no other dtype.
    dtypes = ("bf16", "fp16", "fp32", "none", "dict")
    for dtype in dtypes:
        for _ in range(2):
            assert_loads_equal(saved(family), dtype)
    assert (len(built), len(skeletons()), len(proved)) == (5, 5, looks)


@pytest.mark.usefixtures("skeletons")
def test_another_checkpoint_takes_no_other_look(saved, copied, skeletons, built, proved, tmp_path):
    assert_loads_equal(saved("stable-diffusion"), "bf16")
    source = copied("stable-diffusion").rename(tmp_path / "tuned")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: t * 2 for name, t in load_file(path).items()}, path, {"format": "pt"})
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert (len(built), len(skeletons()), len(proved)) == (2, 2, 1)


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
    """Let the constructor of a class run some code in half precision, as if the library had it."""

    def change(code):
        held = vars(_HOME)
        plain = diffusers.AutoencoderKL.__init__
        added = {"table": [], "registry": {}, "plain_init": plain, "torch": torch}
        for name, value in added.items():
            monkeypatch.setitem(held, name, value)
        source = (
            "def other(self):\n    table.append(1)\n"
            "def same(self):\n    pass\n"
            "def __init__(self, *a, **k):\n    plain_init(self, *a, **k)\n"
            f"    if torch.get_default_dtype() == torch.float16: {code}\n"
        )
        made = {}
        exec(compile(source, _HOME.__file__, "exec"), held, made)
        for name in ("other", "same"):
            monkeypatch.setitem(held, name, made[name])
        made["__init__"].__wrapped__ = plain
        monkeypatch.setattr(diffusers.AutoencoderKL, "__init__", made["__init__"])

    return change


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("table.append(1)", "table"),
        ("registry[str(torch.get_default_dtype())] = self", "registry"),
        ("torch.use_deterministic_algorithms(True)", "a mode of torch"),
        ("open('/tmp/shmload-planted', 'w').close()", "/tmp/shmload-planted"),
        ("self.note = object()", "builtins.object"),
        ("torch.rand(1, generator=torch.default_generator)", "random numbers by rand"),
    ],
)
def test_what_one_dtype_alone_leaves_is_found(examined, plant, proved, code, reason):
    plant(code)
    assert examined("bfloat16").models
    made = examined("float16")
    assert made.models is None
    assert reason in made.reason
    assert len(proved) == 1


@pytest.mark.parametrize(("code", "has_one"), [("other(self)", False), ("same(self)", True)])
def test_code_that_runs_in_one_dtype_alone_takes_a_look(examined, plant, proved, code, has_one):
    plant(code)
    assert examined("bfloat16").models
    assert bool(examined("float16").models) == has_one
    assert len(proved) == 1 + has_one


def test_what_one_dtype_alone_says_is_repeated(examined, plant, proved, monkeypatch):
    # Else the handlers, those of pytest and of tests before, are code that runs in one dtype alone.
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [logging.NullHandler()])
    plant("import logging; logging.getLogger('diffusers.planted').warning('planted')")
    assert not examined("bfloat16").messages
    assert [each.text for each in examined("float16").messages] == ["planted"]
    assert len(proved) == 1


def test_class_that_leaves_something_is_refused_in_each_dtype(examined, plant, proved):
    plant("pass\n    table.append(1)")
    for dtype in ("bfloat16", "float16", "float32"):
        made = examined(dtype)
        assert made.models is None
        assert "table" in made.reason
    assert len(proved) == 1
