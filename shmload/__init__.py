"""Loads diffusion pipelines through shared memory.

Checkpoint shards are decoded once, by worker processes, into POSIX shared memory; every process
then attaches them in milliseconds and shares one copy. Importing this package imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shmload._errors import (
        ArgumentError,
        CapacityError,
        CheckpointError,
        IndexMalformed,
        MemoryLimitExceeded,
        ProtocolError,
        SegmentBusy,
        SegmentCorrupt,
        SegmentError,
        SegmentNotFound,
        SegmentTimeout,
        SegmentUntrusted,
        ShardChanged,
        ShardMalformed,
        ShardMissing,
        ShardTruncated,
        ShardUnreadable,
        SharedMemoryFull,
        ShmloadError,
        SourceNotFound,
        UnknownComponent,
        UnknownDtype,
        WorkerDied,
        WorkerError,
        WorkerFailed,
        WorkerStalled,
    )
    from shmload._plan import Action, Plan, ShardPlan
    from shmload._residency import SegmentInfo, collect_garbage, evict, segments, verify
    from shmload._state_dict import load_state_dict
    from shmload._warm import WarmReport, plan, view, warm
    from shmload.integrations.diffusers import load_pipeline

_MODULES = {
    "shmload._errors": (
        "ArgumentError",
        "CapacityError",
        "CheckpointError",
        "IndexMalformed",
        "MemoryLimitExceeded",
        "ProtocolError",
        "SegmentBusy",
        "SegmentCorrupt",
        "SegmentError",
        "SegmentNotFound",
        "SegmentTimeout",
        "SegmentUntrusted",
        "ShardChanged",
        "ShardMalformed",
        "ShardMissing",
        "ShardTruncated",
        "ShardUnreadable",
        "SharedMemoryFull",
        "ShmloadError",
        "SourceNotFound",
        "UnknownComponent",
        "UnknownDtype",
        "WorkerDied",
        "WorkerError",
        "WorkerFailed",
        "WorkerStalled",
    ),
    "shmload._plan": ("Action", "Plan", "ShardPlan"),
    "shmload._residency": ("SegmentInfo", "collect_garbage", "evict", "segments", "verify"),
    "shmload._state_dict": ("load_state_dict",),
    "shmload._warm": ("WarmReport", "plan", "view", "warm"),
    "shmload.integrations.diffusers": ("load_pipeline",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Action",
    "ArgumentError",
    "CapacityError",
    "CheckpointError",
    "IndexMalformed",
    "MemoryLimitExceeded",
    "Plan",
    "ProtocolError",
    "SegmentBusy",
    "SegmentCorrupt",
    "SegmentError",
    "SegmentInfo",
    "SegmentNotFound",
    "SegmentTimeout",
    "SegmentUntrusted",
    "ShardChanged",
    "ShardMalformed",
    "ShardMissing",
    "ShardPlan",
    "ShardTruncated",
    "ShardUnreadable",
    "SharedMemoryFull",
    "ShmloadError",
    "SourceNotFound",
    "UnknownComponent",
    "UnknownDtype",
    "WarmReport",
    "WorkerDied",
    "WorkerError",
    "WorkerFailed",
    "WorkerStalled",
    "collect_garbage",
    "evict",
    "load_pipeline",
    "load_state_dict",
    "plan",
    "segments",
    "verify",
    "view",
    "warm",
]


def __getattr__(name: str) -> Any:  # each name has its own type, see above
    """Import a public name's module on first use, so that `import shmload` stays light."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    value.__module__ = __name__  # what tracebacks and help() show
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
