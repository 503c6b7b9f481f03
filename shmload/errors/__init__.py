"""Every error that shmload raises on purpose; import them from here.

Guarantee: each error is built from facts and says what happened, to which file or segment, and what
to do. It can be pickled. May import `_wording` only.

    ShmloadError
    ├── ArgumentError (ValueError)
    │   ├── UnknownArgument (TypeError)
    │   ├── UnknownDtype
    │   ├── UnknownComponent
    │   ├── UnknownModule
    │   ├── DeviceMapMalformed
    │   │   └── DeviceMissing
    │   ├── DeviceUnsupported
    │   └── DuplicateKey
    ├── LibraryMissing (ImportError)
    ├── LibraryTooOld (ImportError)
    ├── ImportCutShort (ImportError)
    ├── LibrariesDisturbed (RuntimeError)
    ├── SourceNotFound (FileNotFoundError)
    ├── CheckpointError
    │   ├── ComponentFailed
    │   ├── ShardMissing (FileNotFoundError)
    │   ├── ShardUnreadable (OSError)
    │   ├── ShardMalformed
    │   │   └── WrongFormat
    │   │       └── PickleUnread
    │   ├── KindNotDequantised
    │   ├── ShardTruncated
    │   ├── ShardChanged
    │   ├── SourceChanged
    │   └── IndexMalformed
    ├── CapacityError (OSError)
    │   ├── SharedMemoryFull
    │   ├── MemoryLimitExceeded
    │   ├── NoRoom
    │   ├── ProcessLimitExceeded
    │   └── DoesNotFit
    ├── SwitchTimeout (TimeoutError)
    ├── JobError
    │   ├── ItemFailed
    │   │   └── ItemKilled
    │   ├── JobFailed
    │   └── ResultsError
    │       ├── ResultsBusy
    │       ├── ResultsMismatch
    │       ├── ResultsInaccessible (OSError)
    │       └── ResultsUnfinished (FileNotFoundError)
    ├── WorkerError
    │   ├── WorkerDied
    │   ├── WorkerStalled
    │   └── WorkerFailed
    ├── ServiceError
    ├── ProtocolError
    ├── NodeError
    ├── TemplateUnavailable
    ├── ViewRefused (OSError)
    └── SegmentError
        ├── SegmentNotFound (KeyError)
        ├── AmbiguousName (ValueError)
        ├── SegmentBusy
        ├── NotPublishable
        ├── PublicationBroken
        ├── UpdateRefused
        ├── SegmentCorrupt
        ├── SegmentRemoved
        ├── SegmentUntrusted
        ├── SharedMemoryUnusable (OSError)
        └── SegmentTimeout (TimeoutError)
"""

from shmload.errors.memory import *  # noqa: F403 `__all__` below lists the errors among them
from shmload.errors.processes import *  # noqa: F403
from shmload.errors.sources import *  # noqa: F403
from shmload.errors.sources import ShmloadError

__all__ = sorted(
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, ShmloadError)
)

for _name in __all__:
    globals()[_name].__module__ = "shmload"  # what tracebacks and help() show
