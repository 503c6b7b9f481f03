"""The table of devices that shmload copies to, by their kind as torch names it.

To add one: a module with a `Runtime`, and its row here. Importing this module imports no torch.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmload._compat import added_device_kind
from shmload.errors import ArgumentError, DeviceUnsupported

if TYPE_CHECKING:
    import torch

    from shmload._devices.runtime import Runtime


def _cuda(device: "torch.device") -> "Runtime":
    import torch

    from shmload._devices.cuda_runtime import CudaRuntime

    return CudaRuntime(torch.device("cuda", device.index or 0))


def _generic(device: "torch.device") -> "Runtime":
    import torch

    from shmload._devices.generic_runtime import GenericRuntime

    return GenericRuntime(torch.device(device.type, device.index or 0))


def _host(device: "torch.device") -> "Runtime":
    from shmload._devices.host_runtime import HostRuntime

    return HostRuntime()


def _mps(device: "torch.device") -> "Runtime":
    raise DeviceUnsupported(
        str(device),
        "it uses the memory of the host, so weights need no copy through a ring",
        "omit device_map and call .to('mps') on the pipeline",
    )


# Of the drivers of NVIDIA (also Jetson, WSL), AMD, Intel, Ascend, and of accelerators that the
# kernel knows as such.
_DRIVERS = (
    "/dev/nvidiactl",
    "/dev/nvmap",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/davinci_manager",
    "/dev/accel",
    "/proc/driver/nvidia",
    "/sys/module/i915",
    "/sys/module/xe",
)


def may_have_accelerators() -> bool:
    """Tell without torch whether this machine has a driver for accelerators, as far as known."""
    return any(map(os.path.exists, _DRIVERS))


RUNTIMES: dict[str, Callable[["torch.device"], "Runtime"]] = {
    "cuda": _cuda,
    "cpu": _host,
    "mps": _mps,
    **dict.fromkeys(("xpu", "npu", "hpu", "mlu", "mtia", "musa", "privateuseone"), _generic),
}
"""What makes the runtime of a device, by the device's kind."""


def is_known(kind: str) -> bool:
    """Tell whether there may be devices of a kind: in the table, or added to torch by a package.

    Args:
        kind: as torch names it, such as `npu`.
    """
    return kind in RUNTIMES or kind == _added_kind()


def runtime_of(device: "torch.device") -> "Runtime":
    """Return the runtime of a device that tensors are to be copied to.

    Raises:
        ArgumentError: shmload copies to no device of this kind.
        DeviceUnsupported: torch lacks something for it; or it needs no copies.
    """
    if not is_known(device.type):
        raise ArgumentError(f"shmload copies to {', '.join(RUNTIMES)}, and not to {device}")
    return RUNTIMES.get(device.type, _generic)(device)


def _added_kind() -> str | None:
    """Return the kind of device that a package has added to torch; None without torch."""
    torch = sys.modules.get("torch")
    return added_device_kind(torch) if torch else None
