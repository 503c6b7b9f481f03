"""Drops root for a while: root may open every file, so permission tests need another user."""

import contextlib
import os

_NOBODY = 65534


@contextlib.contextmanager
def no_privileges():
    """Run the block as another user if this process is root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)  # the kernel drops the capabilities too
    try:
        yield
    finally:
        os.seteuid(0)
