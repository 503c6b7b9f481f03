"""Every error that shmload raises on purpose; import them from here.

Guarantee: each error is built from facts and says what happened, to which file or segment, and what
to do. It can be pickled, and the service sends it to a client by name. May import `_wording` only.

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
    │   ├── ProcessLimitExceeded
    │   └── DoesNotFit
    ├── JobError
    │   ├── ItemError
    │   │   ├── ItemFailed
    │   │   └── ItemKilled
    │   └── JobFailed
    ├── WorkerError
    │   ├── WorkerDied
    │   ├── WorkerStalled
    │   └── WorkerFailed
    ├── ServiceError
    │   ├── ServiceUnavailable (ConnectionError)
    │   │   └── ServiceSilent
    │   ├── ServiceRunning
    │   ├── SocketUnusable
    │   └── PeerRefused (PermissionError)
    ├── ResultsError
    │   ├── ResultsBusy
    │   ├── ResultsMismatch
    │   ├── ResultsCorrupt
    │   ├── ResultsChanged
    │   ├── ResultsInaccessible (OSError)
    │   └── ResultsUnfinished (FileNotFoundError)
    ├── ProtocolError
    ├── NodeError
    │   ├── NodeLost
    │   ├── NodeTimeout (TimeoutError)
    │   └── NodeFailed
    ├── TemplateUnavailable
    ├── ViewError
    │   ├── ViewRefused (FileExistsError)
    │   ├── ViewNotFound (FileNotFoundError)
    │   ├── ViewUnwritable (OSError)
    │   └── ViewBusy (TimeoutError)
    └── SegmentError
        ├── SegmentNotFound (KeyError)
        ├── AmbiguousName (ValueError)
        ├── SegmentBusy
        ├── SegmentCorrupt
        ├── SegmentProtected
        ├── SegmentRemoved
        ├── SegmentUntrusted
        ├── SharedMemoryUnusable (OSError)
        └── SegmentTimeout (TimeoutError)
"""

from shmload.errors.arguments import (
    ArgumentError,
    DeviceMapMalformed,
    DeviceMissing,
    DeviceUnsupported,
    UnknownArgument,
    UnknownComponent,
    UnknownDtype,
    UnknownModule,
)
from shmload.errors.base import ShmloadError
from shmload.errors.capacity import (
    CapacityError,
    DoesNotFit,
    MemoryLimitExceeded,
    ProcessLimitExceeded,
    SharedMemoryFull,
)
from shmload.errors.checkpoints import (
    CheckpointError,
    IndexMalformed,
    KindNotDequantised,
    PickleUnread,
    ShardChanged,
    ShardMalformed,
    ShardMissing,
    ShardTruncated,
    ShardUnreadable,
    SourceChanged,
    SourceNotFound,
    WrongFormat,
)
from shmload.errors.jobs import (
    DuplicateKey,
    ItemError,
    ItemFailed,
    ItemKilled,
    JobError,
    JobFailed,
    NodeError,
    NodeFailed,
    NodeLost,
    NodeTimeout,
    ResultsBusy,
    ResultsChanged,
    ResultsCorrupt,
    ResultsError,
    ResultsInaccessible,
    ResultsMismatch,
    ResultsUnfinished,
)
from shmload.errors.libraries import (
    ImportCutShort,
    LibrariesDisturbed,
    LibraryMissing,
    LibraryTooOld,
)
from shmload.errors.segments import (
    AmbiguousName,
    SegmentBusy,
    SegmentCorrupt,
    SegmentError,
    SegmentNotFound,
    SegmentRemoved,
    SegmentTimeout,
    SegmentUntrusted,
    SharedMemoryUnusable,
)
from shmload.errors.service import (
    PeerRefused,
    ServiceError,
    ServiceRunning,
    ServiceSilent,
    ServiceUnavailable,
    SocketUnusable,
    TemplateUnavailable,
)
from shmload.errors.views import (
    SegmentProtected,
    ViewBusy,
    ViewError,
    ViewNotFound,
    ViewRefused,
    ViewUnwritable,
)
from shmload.errors.workers import (
    ProtocolError,
    WorkerDied,
    WorkerError,
    WorkerFailed,
    WorkerStalled,
)

__all__ = [
    "AmbiguousName",
    "ArgumentError",
    "CapacityError",
    "CheckpointError",
    "DeviceMapMalformed",
    "DeviceMissing",
    "DeviceUnsupported",
    "DoesNotFit",
    "DuplicateKey",
    "ImportCutShort",
    "IndexMalformed",
    "ItemError",
    "ItemFailed",
    "ItemKilled",
    "JobError",
    "JobFailed",
    "KindNotDequantised",
    "LibrariesDisturbed",
    "LibraryMissing",
    "LibraryTooOld",
    "MemoryLimitExceeded",
    "NodeError",
    "NodeFailed",
    "NodeLost",
    "NodeTimeout",
    "PeerRefused",
    "PickleUnread",
    "ProcessLimitExceeded",
    "ProtocolError",
    "ResultsBusy",
    "ResultsChanged",
    "ResultsCorrupt",
    "ResultsError",
    "ResultsInaccessible",
    "ResultsMismatch",
    "ResultsUnfinished",
    "SegmentBusy",
    "SegmentCorrupt",
    "SegmentError",
    "SegmentNotFound",
    "SegmentProtected",
    "SegmentRemoved",
    "SegmentTimeout",
    "SegmentUntrusted",
    "ServiceError",
    "ServiceRunning",
    "ServiceSilent",
    "ServiceUnavailable",
    "ShardChanged",
    "ShardMalformed",
    "ShardMissing",
    "ShardTruncated",
    "ShardUnreadable",
    "SharedMemoryFull",
    "SharedMemoryUnusable",
    "ShmloadError",
    "SocketUnusable",
    "SourceChanged",
    "SourceNotFound",
    "TemplateUnavailable",
    "UnknownArgument",
    "UnknownComponent",
    "UnknownDtype",
    "UnknownModule",
    "ViewBusy",
    "ViewError",
    "ViewNotFound",
    "ViewRefused",
    "ViewUnwritable",
    "WorkerDied",
    "WorkerError",
    "WorkerFailed",
    "WorkerStalled",
    "WrongFormat",
]

for _name in __all__:
    globals()[_name].__module__ = "shmload"  # what tracebacks and help() show
