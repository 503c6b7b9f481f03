"""Every error that shmload raises on purpose; import them from here.

Guarantee: each error is built from facts and says what happened, to which file or segment, and what
to do. It can be pickled. May import `_wording` only.
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
