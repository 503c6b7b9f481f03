"""Fixtures of the tests that need a CUDA device; `scripts/gpu-check` runs them."""

import gc

import pytest
import torch


@pytest.fixture
def base_line():
    """Return the bytes allocated on the CUDA devices after a collection of garbage."""

    def measure():
        gc.collect()
        torch.cuda.synchronize()
        return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))

    return measure
