"""Files without a name, of some bytes."""

import contextlib
import os


@contextlib.contextmanager
def in_memory(content=b""):
    """Make a file of some bytes; its descriptor is open in the block."""
    fd = os.memfd_create("file")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)
