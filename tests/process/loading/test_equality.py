"""`load_pipeline` returns the same as `from_pretrained` of the pipeline's class, bit for bit."""

import gc

import diffusers
import numpy as np
import pytest
import torch
from comparing import DTYPES, assert_loads_equal, reference
from pipelines import FAMILIES, run

import shmload

pytestmark = pytest.mark.libraries

# Ways to store a pipeline: dtype, variant, sharded.
STORED = {
    f"{dtype}{'-sharded' if sharded else ''}": (dtype, variant, sharded)
    for dtype, variant in (("float32", None), ("bfloat16", None), ("float16", "fp16"))
    for sharded in (False, True)
}
# Stable Diffusion, which has the most kinds of components, takes every dtype from every stored one;
# every second of these is sharded. Each other family takes every dtype once, and the way it is
# stored moves on from one family to the next: so nearly each pair of dtype and storage occurs.
WHOLE = "stable-diffusion"
CASES = [
    (WHOLE, list(STORED)[2 * stored + (stored + shift) % 2], dtype)
    for stored in range(len(STORED) // 2)
    for shift, dtype in enumerate(DTYPES)
] + [
    (family, list(STORED)[(number + 2 * shift) % len(STORED)], dtype)
    for number, family in enumerate(f for f in FAMILIES if f != WHOLE)
    for shift, dtype in enumerate(dtype for dtype in DTYPES if dtype != "bf16-by-name")
]
# Worker processes decode one dtype of each sharded pipeline, this process all others: what converts
# is `Filler` here and there.
BY_WORKERS = {(f, s): d for f, s, d in reversed(CASES) if STORED[s][2]}


@pytest.mark.parametrize(("family", "stored", "dtype"), CASES)
def test_pipeline_equals_the_librarys(
    saved, shm_names, worker_pids, configure, family, stored, dtype
):
    stored_dtype, variant, sharded = STORED[stored]
    source = saved(family, stored_dtype, variant, sharded=sharded)
    if BY_WORKERS.get((family, stored)) == dtype:
        configure(inline_nbytes=0, workers=2)
    assert_loads_equal(source, dtype, variant=variant)
    assert (shm_names(), worker_pids()) == ([], [])


@pytest.mark.usefixtures("bytes_come_last")
@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "bf16") for family in FAMILIES), (WHOLE, "none")]
)
def test_pipeline_built_before_any_byte_is_there_is_equal(saved, family, dtype):
    assert_loads_equal(saved(family), dtype)


def note_sum(model):
    model.note = sum(p.detach().double().sum().item() for p in model.parameters())


def copy_weight(model):
    model.register_buffer("copied", model.conv_in.weight.detach().clone())


@pytest.mark.usefixtures("either_order")
@pytest.mark.parametrize("look", [note_sum, copy_weight])
def test_weights_that_the_library_looks_at_while_it_loads_are_there(
    large_pipeline, monkeypatch, look
):
    def load_and_look(cls, *args, **kwargs):
        model = plain(*args, **kwargs)
        look(model)
        return model

    plain = diffusers.UNet2DModel.from_pretrained
    monkeypatch.setattr(diffusers.UNet2DModel, "from_pretrained", classmethod(load_and_look))
    assert_loads_equal(large_pipeline, "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_generate_the_same(saved, family):
    got = run(shmload.load_pipeline(saved(family), torch_dtype=torch.float32))
    wanted = run(reference(saved(family), torch.float32))
    assert np.isfinite(wanted).all()
    assert np.abs(got - wanted).max() <= 1e-5


@pytest.mark.usefixtures("unfrozen")
def test_garbage_collector_is_left_as_it_was(saved):
    assert gc.isenabled()
    shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
