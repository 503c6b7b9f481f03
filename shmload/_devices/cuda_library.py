"""Calls of the CUDA runtime that torch does not show, in the library that torch has loaded.

ROCm has the same functions under other names; its attributes have other numbers, so they are not
asked for.
"""

import contextlib
import ctypes
import functools

from shmload._host.procfs import mapped_library


class CudaLibrary:
    """A loaded library.

    Args:
        library: as ctypes has it.
        prefix: of its functions' names: `cuda` or `hip`.
    """

    def __init__(self, library: ctypes.CDLL, prefix: str) -> None:
        self._library = library
        self._prefix = prefix

    def attribute(self, number: int, device: int) -> int | None:
        """Return an attribute of a device; None if the library does not know it.

        Args:
            number: as `enum cudaDeviceAttr` has it.
            device: its index.
        """
        if self._prefix != "cuda":
            return None
        value = ctypes.c_int(-1)
        if self._library.cudaDeviceGetAttribute(ctypes.byref(value), number, device) != 0:
            self.take_error()
            return None
        return value.value

    def take_error(self) -> None:
        """Forget the last error of this thread's calls, or the next kernel is blamed for it."""
        getattr(self._library, f"{self._prefix}GetLastError")()


@functools.cache
def cuda_library() -> CudaLibrary | None:
    """Return the library that torch has loaded; None if it is a part of another one.

    In some of torch's packages its file's name has a digest in it: `libcudart-d0da41ae.so.11.0`.
    """
    for stem, prefix in (("libcudart", "cuda"), ("libamdhip64", "hip")):
        if path := mapped_library(stem):
            with contextlib.suppress(OSError):  # the file was replaced since
                return CudaLibrary(ctypes.CDLL(path), prefix)
    return None
