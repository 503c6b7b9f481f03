"""The errors of libraries that are installed, or are not."""

import contextlib
from collections.abc import Iterator, Sequence

from shmload.errors.base import ShmloadError


class LibraryTooOld(ShmloadError, ImportError):
    """An installed library is too old: it lacks a function that shmload needs."""

    def __init__(self, library: str, version: str, wanted: str, reason: str) -> None:
        self.library = library
        self.version = version
        self.wanted = wanted
        super().__init__(
            f"{library} {version} has no {reason}; install {library} {wanted} or later"
        )


class LibraryMissing(ShmloadError, ImportError):
    """A class needs packages that are not installed.

    Attributes:
        class_name: the class.
        packages: what pip calls the packages.
    """

    def __init__(self, class_name: str, packages: Sequence[str]) -> None:
        self.class_name = class_name
        self.packages = tuple(packages)
        verb = "is" if len(packages) == 1 else "are"
        super().__init__(
            f"{class_name} needs {', '.join(packages)}, which {verb} not installed; "
            f"`pip install {' '.join(packages)}`"
        )


@contextlib.contextmanager
def needing(package: str, user: str, install: str) -> Iterator[None]:
    """Import a package that need not be installed.

    A package that is installed and broken raises its own error.

    Args:
        package: as it is imported inside the block.
        user: what needs it.
        install: what pip calls it.

    Raises:
        LibraryMissing: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name != package:
            raise
        raise LibraryMissing(user, [install]) from exc


class ImportCutShort(ShmloadError, ImportError):
    """The import of a library ended halfway in this process, which cannot import it again.

    Attributes:
        package: what is only half there.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"an import of {package} ended halfway in this process, by its own error or by Ctrl-C, "
            "and cannot be repeated; restart the process (in a notebook, the kernel)"
        )


class LibrariesDisturbed(ShmloadError, RuntimeError):
    """Another thread of this process makes torch build models without weights.

    Attributes:
        given: the source, as it was given.
    """

    def __init__(self, given: str) -> None:
        self.given = given
        super().__init__(
            f"{given}: its models were built without weights, because another thread of this "
            "process is in accelerate's init_empty_weights, as in load_lora_weights or "
            "from_pretrained, or two threads were in it at once, which leaves torch changed; "
            "hold one lock around all loads and load_lora_weights; if this error stays, restart "
            "the process"
        )
