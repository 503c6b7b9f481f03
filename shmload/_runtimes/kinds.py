"""The kinds of devices that shmload knows, as torch names them, and those that this machine has.

To add a kind: a module with a `Runtime`, and its row here. Torch is imported only by what asks for
the devices of this machine.
"""

import os
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from shmload._compat import added_device_kind
from shmload._settings import local_rank
from shmload.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from shmload._runtimes.runtime import Runtime


class Kind(NamedTuple):
    """A kind of device, as far as it is known without torch."""

    import_runtime: "Callable[[], type[Runtime]] | None"
    """Imports the runtime of its devices; None if they use the memory of the host."""
    drivers: tuple[str, ...] = ()
    """Paths of which one is there if its driver is."""
    other_names: tuple[str, ...] = ()
    """What people call it by mistake."""


def _cuda() -> "type[Runtime]":
    from shmload._runtimes.cuda import CudaRuntime

    return CudaRuntime


def _generic() -> "type[Runtime]":
    from shmload._runtimes.runtime import Runtime

    return Runtime


KINDS = {
    # NVIDIA's (also Jetson's and that of WSL), and AMD's, whose devices torch calls the same.
    "cuda": Kind(
        _cuda,
        ("/dev/nvidiactl", "/dev/nvmap", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd"),
        ("gpu", "rocm", "hip", "nvidia"),
    ),
    **dict.fromkeys(("cpu", "mps"), Kind(None)),
    "xpu": Kind(_generic, ("/sys/module/i915", "/sys/module/xe", "/dev/dxg")),
    "npu": Kind(_generic, ("/dev/davinci_manager",)),
    **dict.fromkeys(("hpu", "mlu", "mtia", "musa", "privateuseone"), Kind(_generic)),
}
"""The rows of the table; a package may have added one more kind to torch, which is generic."""
USUAL_KIND = "cuda"
"""What a bare index means where no device is known."""
_ANY_ACCELERATOR = "/dev/accel"  # of drivers that the kernel knows as such


def is_known(kind: str) -> bool:
    """Tell whether there may be devices of a kind: in the table, or added to torch by a package.

    Args:
        kind: as torch names it, such as `npu`.
    """
    torch = sys.modules.get("torch")
    return kind in KINDS or bool(torch and kind == added_device_kind(torch))


def meant_kind(name: str) -> str | None:
    """Return the kind that people call by a name that is none."""
    return next((kind for kind, row in KINDS.items() if name in row.other_names), None)


def may_have_accelerators() -> bool:
    """Tell without torch whether this machine has a driver for accelerators, as far as known."""
    paths = (path for row in KINDS.values() for path in row.drivers)
    return any(map(os.path.exists, (_ANY_ACCELERATOR, *paths)))


def runtime_of(device: "torch.device") -> "Runtime":
    """Return the runtime of a device that tensors are to be copied to.

    Raises:
        ArgumentError: shmload copies to no device of this kind.
        ArgumentError: torch lacks something for it; or it needs no copies.
    """
    import torch

    if not is_known(device.type):
        raise ArgumentError(f"shmload copies to {', '.join(KINDS)}, and not to {device}")
    runtime = _import_runtime(device.type)
    if runtime is None:
        raise ArgumentError(
            f"shmload cannot copy weights to {device}: it uses the memory of the host, so weights "
            f"need no copy; omit device_map and call .to({device.type!r}) on the "
            "pipeline",
            device=str(device),
            lacks="",
        )
    return runtime(torch.device(device.type, device.index or 0))


def _import_runtime(kind: str) -> "type[Runtime] | None":
    import_runtime = KINDS[kind].import_runtime if kind in KINDS else _generic
    return import_runtime and import_runtime()


# This machine's devices; all of these import torch ------------------------------------------------


def machine_kind() -> str:
    """Return the kind of this machine's accelerators; empty if there are none to copy to."""
    import torch

    if module_of(USUAL_KIND).is_available():
        return USUAL_KIND
    accelerator = getattr(torch, "accelerator", None)  # from torch 2.6 on
    if accelerator is None or not accelerator.is_available():
        return ""
    kind = str(accelerator.current_accelerator().type)
    return kind if _import_runtime(kind) else ""


def accelerator_names() -> tuple[str, ...]:
    """Return the names of all accelerators, such as `cuda:0`; may be none."""
    kind = machine_kind()
    count = module_of(kind).device_count() if kind else 0
    return tuple(f"{kind}:{index}" for index in range(count))


def current_index() -> int:
    """Return the index of the accelerator that a name without an index means, such as `cuda`.

    That is the process's current device. If that is the first one, set or not, it is the device of
    the local rank that a launcher gives, such as torchrun or MPI, if there are so many.
    """
    kind = machine_kind()
    if not kind:
        return 0
    module = module_of(kind)
    # Before the first use of its kind, no device can have been set; and to ask would be that use.
    is_used = getattr(module, "is_initialized", lambda: True)()
    index = int(module.current_device()) if is_used else 0
    rank = local_rank()
    if index == 0 and rank is not None and rank < module.device_count():
        return rank
    return index


def free_nbytes(names: Collection[str]) -> dict[str, int | None]:
    """Return how much memory of some accelerators is free, in bytes; None if torch cannot tell.

    What torch has reserved and does not use counts as free.

    Args:
        names: of devices of the one kind that this machine has.
    """
    kind = machine_kind()
    if not (kind and names):
        return {}
    indices = {name: int(name.partition(":")[2]) for name in names}
    runtime, module = _import_runtime(kind), module_of(kind)
    told = runtime.free_without_context(indices.values()) if runtime else {}
    return {
        name: told[index] if index in told else _free_by_torch(module, index)
        for name, index in indices.items()
    }


def _free_by_torch(module: Any, index: int) -> int | None:
    """Ask torch; that may make a context on the device."""
    ask = getattr(module, "mem_get_info", None)
    if ask is None:
        return None
    unused = int(module.memory_reserved(index)) - int(module.memory_allocated(index))
    return int(ask(index)[0]) + unused


def module_of(kind: str) -> Any:
    """Return torch's module for a kind of device."""
    import torch

    return getattr(torch, kind)
