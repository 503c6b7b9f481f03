"""A device whose tensors have memory and a device type of their own, on any machine.

    import stand_in
    stand_in.install()                 # torch.device("standin") from here on, in this process
    tensor.to("standin")
    stand_in.counts().from_device      # bytes that were copied to the host

It is built from `device.cpp` when it is first used, which takes a minute and a C++ compiler.
"""

import functools
import hashlib
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch

NAME = "standin"
_SOURCE = Path(__file__).with_name("device.cpp")


class Counts(NamedTuple):
    """What was counted since the device was installed, in bytes."""

    to_device: int
    from_device: int
    held: int
    """Memory of the device that is in use now."""


def why_none() -> str:
    """Say why the device cannot be built here; empty if it can."""
    return "" if shutil.which("g++") else "there is no C++ compiler (g++)"


@functools.cache
def install() -> None:
    """Give torch the device, in this process."""
    _extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def counts() -> Counts:
    """Return what was counted."""
    return Counts(*_extension().counts())


@functools.cache
def _extension() -> Any:
    from torch.utils import cpp_extension

    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + _SOURCE.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"shmload-stand-in-{digest.hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    return cpp_extension.load("stand_in_device", [str(_SOURCE)], build_directory=str(folder))


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    values = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "mem_get_info": lambda device=None: (16 << 30, 16 << 30),
    }
    vars(module).update(values)
    return module
