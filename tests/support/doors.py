"""The functions that take a source, and the check that each refuses bad input."""

import pytest
import torch

import shmload


def view(source, **kwargs):
    with shmload.view(source, **kwargs):
        pass


def state_dict(source, torch_dtype=None, **kwargs):
    shmload.load_state_dict(source, torch_dtype, **kwargs)


DOORS = {"warm": shmload.warm, "plan": shmload.plan, "view": view, "state-dict": state_dict}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
decoding_door = pytest.mark.parametrize(
    "door", [shmload.warm, view, state_dict], ids=["warm", "view", "state-dict"]
)


def refusal(door, source, error, *words, torch_dtype=torch.bfloat16, **kwargs):
    """Check that a call raises the right error with these words; return the error.

    The weights of the tests' checkpoints are float32, so with the default dtype they are decoded.
    """
    with pytest.raises(error) as caught:
        door(source, torch_dtype=torch_dtype, **kwargs)
    assert type(caught.value) is error
    assert isinstance(caught.value, shmload.ShmloadError)
    for word in words:
        assert str(word) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value
