"""A device whose tensors have memory and a device type of their own, on any machine.

    import stand_in
    stand_in.install()                 # torch.device("standin") from here on, in this process
    tensor.to("standin")
    stand_in.counts().from_device      # bytes that were copied to the host

It is built from `device.cpp` when it is first used, which takes a minute and a C++ compiler.
"""

import contextlib
import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
import types
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import torch

NAME = "standin"
HELD_AT_MOST = 16 << 30
"""What it says of its size, in bytes."""

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


def build() -> Path:
    """Build the device unless that was done; return its library.

    In a process of its own that loads it: a process that has the device is no other test's.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + _SOURCE.read_bytes())
    folder = Path(sys.prefix) / f"stand-in-{digest.hexdigest()[:12]}"
    folder.mkdir(exist_ok=True)
    library = folder / "stand_in_device.so"
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not library.exists():
            (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed
            code = (
                "import sys; from torch.utils import cpp_extension; "
                "cpp_extension.load('stand_in_device', [sys.argv[1]], build_directory=sys.argv[2])"
            )
            subprocess.run([sys.executable, "-c", code, _SOURCE, folder], check=True)
    return library


@functools.cache
def _extension() -> Any:
    library = build()
    loader = ExtensionFileLoader("stand_in_device", str(library))
    spec = spec_from_file_location("stand_in_device", library, loader=loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Stream:
    """One of a device that is ready at once."""

    def synchronize(self) -> None:
        pass


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    values = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "Stream": _Stream,
        "stream": contextlib.nullcontext,
        "current_stream": lambda device=None: _Stream(),
        "empty_cache": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "memory_allocated": lambda device=None: counts().held,
        "memory_reserved": lambda device=None: counts().held,
        "mem_get_info": lambda device=None: (HELD_AT_MOST - counts().held, HELD_AT_MOST),
    }
    vars(module).update(values)
    return module
