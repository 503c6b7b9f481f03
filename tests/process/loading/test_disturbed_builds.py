"""Loads while another thread makes torch build models without weights, as LoRA loaders do."""

import contextlib
import threading

import diffusers
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from comparing import assert_component_equal

import shmload
from shmload._building import libraries

pytestmark = pytest.mark.libraries


@contextlib.contextmanager
def empties_in_another_thread():
    """Let another thread be in `init_empty_weights` during a block."""
    entered, may_leave = threading.Event(), threading.Event()

    def stay():
        with init_empty_weights():
            entered.set()
            assert may_leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert entered.wait(60)
    try:
        yield
    finally:
        may_leave.set()
        thread.join()


@pytest.mark.parametrize("times", [1, 2])
def test_pipeline_built_while_another_thread_empties_models_has_its_weights(
    saved, monkeypatch, times
):
    source = saved("stable-diffusion")
    wanted = diffusers.DiffusionPipeline.from_pretrained(source)
    calls = []
    theirs = transformers.CLIPTextModel.from_pretrained

    def disturbed(*args, **kwargs):
        calls.append(args)
        with empties_in_another_thread() if len(calls) <= times else contextlib.nullcontext():
            return theirs(*args, **kwargs)

    monkeypatch.setattr(transformers.CLIPTextModel, "from_pretrained", disturbed)
    pipe = shmload.load_pipeline(source)
    assert len(calls) == times + 1
    assert_component_equal(pipe.text_encoder, wanted.text_encoder, "text_encoder")


def test_load_while_torch_stays_changed_is_an_error_and_the_next_works(saved, monkeypatch):
    monkeypatch.setattr(libraries, "_WAIT_S", 0.0)
    source = saved("stable-diffusion") / "text_encoder"
    with (
        empties_in_another_thread(),
        pytest.raises(shmload.LibrariesDisturbed, match="load_lora_weights"),
    ):
        shmload.load_model("CLIPTextModel", source)
    model = shmload.load_model("CLIPTextModel", source)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.dtype is torch.float32
