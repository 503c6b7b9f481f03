"""This machine's accelerators, by torch: names, the current one, free memory. Imports torch.

Guarantee: where NVIDIA's management library answers, no question makes a context on a device.
"""

from collections.abc import Collection
from typing import Any

from shmload._compat import has_cuda_context
from shmload._host import nvml
from shmload._settings import local_rank

# They have no memory of their own, or are no accelerators.
_NOT_LISTED = ("cpu", "mps")


def accelerator_names() -> tuple[str, ...]:
    """Return the names of all accelerators, such as `cuda:0`; may be none."""
    kind = _kind()
    return tuple(f"{kind}:{index}" for index in range(_module(kind).device_count())) if kind else ()


def current_index() -> int:
    """Return the index of the accelerator that a name without an index means, such as `cuda`.

    That is the process's current device. If that is the first one, set or not, it is the device of
    the local rank that a launcher gives, such as torchrun or MPI, if there are so many.
    """
    kind = _kind()
    if not kind:
        return 0
    module = _module(kind)
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
    kind = _kind()
    if not (kind and names):
        return {}
    module = _module(kind)
    indices = {name: int(name.partition(":")[2]) for name in names}
    by_nvml = _free_by_nvml([each for each in indices.values() if not _has_context(each)], kind)
    return {
        name: by_nvml[index] if index in by_nvml else _free_by_torch(module, index)
        for name, index in indices.items()
    }


def _free_by_torch(module: Any, index: int) -> int | None:
    """Ask torch; for CUDA that makes a context on the device."""
    ask = getattr(module, "mem_get_info", None)
    if ask is None:
        return None
    unused = int(module.memory_reserved(index)) - int(module.memory_allocated(index))
    return int(ask(index)[0]) + unused


def _free_by_nvml(indices: list[int], kind: str) -> dict[int, int]:
    """Ask for devices without a context; those that cannot be asked are left out."""
    if kind != "cuda" or not indices:
        return {}
    import torch

    # The properties take no context. Torch before 2.5 has no UUID among them.
    properties = {index: torch.cuda.get_device_properties(index) for index in indices}
    uuids = {index: str(each.uuid) for index, each in properties.items() if hasattr(each, "uuid")}
    found = nvml.free_nbytes(uuids.values())
    return {index: found[uuid] for index, uuid in uuids.items() if uuid in found}


def _has_context(index: int) -> bool:
    """Tell whether this process has a context on a CUDA device."""
    return _module("cuda").is_initialized() and has_cuda_context(index)


def _kind() -> str:
    """Return the kind of this machine's accelerators, as torch names it; empty if there are none.

    ROCm's have the name `cuda`, too.
    """
    import torch

    if torch.cuda.is_available():
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)  # from torch 2.6 on
    if accelerator is None or not accelerator.is_available():
        return ""
    kind = str(accelerator.current_accelerator().type)
    return "" if kind in _NOT_LISTED else kind


def _module(kind: str) -> Any:
    import torch

    return getattr(torch, kind)
