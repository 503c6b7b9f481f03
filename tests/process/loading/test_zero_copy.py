"""A pipeline's tensors lie in shared memory or its files, and writes to them stay private."""

import pytest
import torch
from comparing import DTYPES, assert_equal, reference
from mappings import Mappings, copied_nbytes, state_of
from pipelines import FAMILIES

import shmload

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize(("dtype", "keep"), [("bf16", False), ("fp32", True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_tensor_lies_in_a_segment(saved, evicts, family, dtype, keep):
    stored = {"bf16": "float32", "fp32": "bfloat16"}[dtype]
    pipe = shmload.load_pipeline(saved(family, stored), torch_dtype=DTYPES[dtype][0], keep=keep)
    tensors = state_of(pipe)
    assert len(tensors) > 50
    mappings = Mappings()
    for name, tensor in tensors.items():
        assert mappings.find(tensor)[1].startswith("/dev/shm/shmload-"), name
    assert copied_nbytes(pipe) == 0


def test_same_dtype_maps_the_files_themselves(saved):
    source = saved("flux", "bfloat16")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    mappings = Mappings()
    for tensor in pipe.transformer.state_dict().values():
        assert mappings.find(tensor)[1].startswith(str(source))


def test_writing_is_private(saved, evicts):
    source = saved("flux")
    first = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    with torch.no_grad():
        for parameter in first.transformer.parameters():
            parameter.fill_(7)
    assert copied_nbytes(first) > 0
    second = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert_equal(second, reference(source, torch.bfloat16))
    assert len(shmload.verify()) == len(shmload.segments()) > 0


@pytest.mark.parametrize("order", ["bytes_come_first", "bytes_come_last"])
@pytest.mark.usefixtures("weight_changes")
def test_weight_that_is_changed_while_the_pipeline_is_built(saved, request, order):
    request.getfixturevalue(order)

    source = saved("flux")
    # The write copies the page, including the neighbours' bytes.
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert_equal(got, reference(source, torch.bfloat16))


@pytest.mark.slow
def test_first_pipeline_of_a_program_goes_with_its_last_user(saved, new_child, evicts):
    """Its imports leave circles of frames, and a frame keeps what its callers have made."""
    code = """
import gc, sys, weakref, shmload
pipe = shmload.load_pipeline(sys.argv[1], keep=True, progress=False)
left = weakref.ref(pipe)
del pipe
gc.collect()
print("gone" if left() is None else "alive", flush=True)
"""
    new_child(code, saved("flux")).expect("gone")
