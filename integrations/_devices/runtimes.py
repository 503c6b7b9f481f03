"""The table of devices that shmload copies to, by their kind as torch names it.

To add one: a module with a `Runtime`, and its row here. Importing this module imports no torch.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmload.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from shmload.integrations._devices.runtime import Runtime


def _cuda(device: "torch.device") -> "Runtime":
    import torch

    from shmload.integrations._devices.cuda_runtime import CudaRuntime

    return CudaRuntime(torch.device("cuda", device.index or 0))


def _host(device: "torch.device") -> "Runtime":
    from shmload.integrations._devices.host_runtime import HostRuntime

    return HostRuntime()


# Of the drivers of NVIDIA (also Jetson, WSL) and AMD.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd", "/proc/driver/nvidia")


def may_have_accelerators() -> bool:
    """Tell without torch whether this machine has a driver for accelerators, as far as known."""
    return any(map(os.path.exists, _DRIVERS))


RUNTIMES: dict[str, Callable[["torch.device"], "Runtime"]] = {"cuda": _cuda, "cpu": _host}
"""What makes the runtime of a device, by the device's kind."""


def runtime_of(device: "torch.device") -> "Runtime":
    """Return the runtime of a device that tensors are to be copied to.

    Raises:
        ArgumentError: shmload copies to no device of this kind.
    """
    if device.type not in RUNTIMES:
        raise ArgumentError(f"shmload copies to {', '.join(RUNTIMES)}, and not to {device}")
    return RUNTIMES[device.type](device)
