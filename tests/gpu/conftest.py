"""Tests that need a CUDA device; `scripts/gpu-check` runs them where there is one."""

import gc

import pytest
import torch


@pytest.fixture
def base_line():
    """Return what the tensors of CUDA devices take, in bytes, without garbage."""

    def measure():
        gc.collect()
        torch.cuda.synchronize()
        return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))

    return measure
