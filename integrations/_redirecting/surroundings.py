"""Looks for what makes a library load otherwise than its arguments say."""

import os
import sys

import torch

from shmload.integrations._building.libraries import libraries_lock
from shmload.integrations._redirecting.arguments import InDoubt

_BUILD_TIMEOUT_S = 30.0
_TRUE = ("1", "true", "yes", "on", "y", "t")


def require_ordinary_surroundings() -> None:
    """Check that models made here are ordinary ones, in memory of the host.

    While another thread builds for shmload, the libraries have changed torch for all threads. So
    the check waits for the end of that.

    Raises:
        InDoubt: a mode of torch, or of a library, is on; or the other build takes long.
    """
    if not libraries_lock.acquire(timeout=_BUILD_TIMEOUT_S):
        raise InDoubt("another thread builds a model")
    try:
        _require_ordinary_torch()
    finally:
        libraries_lock.release()
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        raise InDoubt("DeepSpeed ZeRO-3 is on")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in _TRUE:
        raise InDoubt("FSDP is on")


def _require_ordinary_torch() -> None:
    if torch.is_inference_mode_enabled():
        raise InDoubt("torch is in inference mode")
    if torch.get_default_dtype() != torch.float32:
        raise InDoubt("torch has another default dtype")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise InDoubt("a mode of torch is on, such as a default device")
    module = torch.nn.Module
    if any(
        getattr(getattr(module, name), "__module__", None) != module.__module__
        for name in ("register_parameter", "register_buffer", "__init__")
    ):
        raise InDoubt("torch.nn.Module is patched, as by init_empty_weights")
