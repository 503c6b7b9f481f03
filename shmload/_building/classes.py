"""Classes that a user names: by object, by a library's name for them, or as `module.Class`."""

import importlib
from collections.abc import Sequence
from types import ModuleType

from shmload._building.compat import is_missing, missing_backends
from shmload._wording import nearest
from shmload.errors import ArgumentError, LibraryMissing

# Packages that pip calls otherwise than the libraries do.
_PACKAGES = {
    "bs4": "beautifulsoup4",
    "k_diffusion": "k-diffusion",
    "note_seq": "note-seq",
    "onnx": "onnxruntime",
    "opencv": "opencv-python",
    "quanto": "optimum-quanto",
}


def find_class_named(name: str, argument: str, libraries: Sequence[ModuleType]) -> type:
    """Return the class with a name.

    Args:
        name: of a class in one of the libraries, or `module.Class`.
        argument: which names it, for the error.
        libraries: where a name without a module is looked up, in this order.

    Raises:
        ArgumentError: there is no such class.
        LibraryMissing: packages that it needs are missing.
    """
    module_name, _, class_name = name.rpartition(".")
    homes = [_module(module_name, name, argument)] if module_name else list(libraries)
    for home in homes:
        found = getattr(home, class_name, None)
        if isinstance(found, type):
            require_installed(found)
            return found
    where = " and ".join(home.__name__ for home in homes)
    lacks = "have" if len(homes) > 1 else "has"
    known = sorted({each for home in homes for each in dir(home) if each[:1].isupper()})
    raise ArgumentError(
        f"{argument} is {name!r}, but {where} {lacks} no such class{nearest(class_name, known)}; "
        "a class of your own can be given itself, or as 'module.Class'"
    )


def require_installed(found: type) -> None:
    """Check that a class of a library is the real one.

    In place of a class whose packages are missing the libraries have one that raises an error
    wherever it is used.

    Raises:
        LibraryMissing: packages are missing.
    """
    if is_missing(found):
        missing = missing_backends(found)
        raise LibraryMissing(found.__name__, [_PACKAGES.get(name, name) for name in missing])


def name_class(found: type, argument: str, library: ModuleType) -> str:
    """Return a name by which another process finds a class.

    Args:
        found: the class.
        argument: which gave it, for the error.
        library: whose classes need no module before their names.

    Raises:
        ArgumentError: no other process can import it.
    """
    name: str = found.__name__
    if getattr(library, name, None) is found:
        return name
    if found.__module__ == "__main__" or "." in found.__qualname__:
        raise ArgumentError(
            f"{argument} is {found.__qualname__} of {found.__module__}, which other processes "
            "cannot import; put the class into a module"
        )
    return f"{found.__module__}.{found.__qualname__}"


def _module(module_name: str, name: str, argument: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ImportError as exc:
        raise ArgumentError(
            f"{argument} is {name!r}, but {module_name} cannot be imported: {exc}"
        ) from exc
