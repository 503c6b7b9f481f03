"""A class is looked at once; its other dtypes and checkpoints are compared without that."""

import logging

import pytest
from comparing import assert_loads_equal
from safetensors.torch import load_file, save_file

from shmload._building import examining, proofs
from shmload._host.memo import Memo

_IN_HALF_PRECISION = "if torch.get_default_dtype() == torch.float16: "


@pytest.fixture
def examine():
    """Nothing is known of other tests: proofs are counted."""
    return examining.examine


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
    plant(_IN_HALF_PRECISION + code)
    assert examined("bfloat16").models
    made = examined("float16")
    assert made.models is None
    assert reason in made.reason
    assert len(proved) == 1


@pytest.mark.parametrize(("code", "has_one"), [("other(self)", False), ("same(self)", True)])
def test_code_that_runs_in_one_dtype_alone_takes_a_look(examined, plant, proved, code, has_one):
    plant(_IN_HALF_PRECISION + code)
    assert examined("bfloat16").models
    assert bool(examined("float16").models) == has_one
    assert len(proved) == 1 + has_one


def test_what_one_dtype_alone_says_is_repeated(examined, plant, proved, monkeypatch):
    # Else the handlers, those of pytest and of tests before, are code that runs in one dtype alone.
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("diffusers"), "handlers", [logging.NullHandler()])
    plant(
        _IN_HALF_PRECISION
        + "import logging; logging.getLogger('diffusers.planted').warning('planted')"
    )
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
