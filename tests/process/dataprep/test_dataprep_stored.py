"""A job's results folder holds what the function returned, by the items' names."""

import json
import sys

import cloudpickle
import ml_dtypes
import numpy as np
import pytest
import torch

import shmload
from shmload.integrations.results import Results

# Pickle this module's functions by value, so that a job's processes do not import all of the above.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ARRAYS = {
    "bool": np.array([True, False, True]),
    "big endian": np.arange(5, dtype=">f4"),
    "turned": np.arange(12.0).reshape(3, 4).T,
    "every second": np.arange(12, dtype=np.int16)[::2],
    "scalar": np.float64(1.5),
    "nothing": np.zeros((0, 3), np.uint8),
    "bfloat16": np.arange(3).astype(ml_dtypes.bfloat16),
    "complex": np.array([1 + 2j], np.complex64),
}
TENSORS = {
    "bfloat16": torch.arange(7, dtype=torch.bfloat16),
    "view": torch.arange(12.0).reshape(3, 4)[:, 1],
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7),
    "one storage": torch.ones(1).expand(5),
}


@pytest.mark.slow
def test_arrays_and_tensors_of_all_kinds_arrive_as_they_are(light_job, folder):
    job = light_job()
    job.write(lambda pipe, item: item, [ARRAYS, TENSORS, {}], folder)
    arrays, tensors, nothing = (Results(folder)[place] for place in range(3))
    assert nothing == {}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].shape == array.shape
        assert arrays[name].to(torch.complex128).numpy().tolist() == array.tolist()
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert tensors[name].to(torch.complex128).tolist() == tensor.to(torch.complex128).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (torch.bfloat16, torch.bfloat16),
        ("fp32", torch.float32),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_floats_are_stored_in_the_dtype_asked_for(light_job, folder, given, stored):
    light_job().write(lambda pipe, item: item, [ARRAYS, TENSORS], folder, save_dtype=given)
    arrays, tensors = (Results(folder)[place] for place in range(2))
    for found, names in [
        (arrays, ["big endian", "turned", "scalar", "bfloat16"]),
        (tensors, ["bfloat16", "view", "parameter", "float8", "one storage"]),
    ]:
        assert {found[name].dtype for name in names} == {stored}
    assert arrays["big endian"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["view"].tolist() == [1, 5, 9]
    for name in ("bool", "every second", "nothing", "complex"):
        assert str(arrays[name].dtype) == f"torch.{ARRAYS[name].dtype}"


def test_dtype_that_is_no_float_is_refused(light_job, folder):
    with pytest.raises(shmload.UnknownDtype):
        light_job().write(lambda pipe, item: item, [ARRAYS], folder, save_dtype="int8")


def test_keys_name_the_items(light_job, folder):
    items = ["b/2.png", "a/1.png", "c"]
    light_job().write(lambda pipe, item: {"n": np.array(len(item))}, items, folder, key=str)
    results = Results(folder)
    assert list(results) == items
    assert results["a/1.png"]["n"] == 7
    lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == items
