"""Loads while another thread makes torch build models without weights, as LoRA loaders do."""

import contextlib
import threading

import pytest
import torch
from accelerate import init_empty_weights

import shmload

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


def test_model_that_another_thread_has_emptied_is_an_error_and_the_next_load_works(saved):
    source = saved("stable-diffusion") / "text_encoder"
    with (
        empties_in_another_thread(),
        pytest.raises(shmload.LibraryError, match="load_lora_weights"),
    ):
        shmload.load_model("CLIPTextModel", source)
    model = shmload.load_model("CLIPTextModel", source)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.dtype is torch.float32
