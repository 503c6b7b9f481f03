"""A maker: what builds one pipeline or model, by the `from_pretrained` of its class.

Makers import no library before they must: workers decode while the classes are imported. A user
names a class by itself, by a library's name for it, or as `module.Class`.
"""

import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

from shmload._checkpoints.chosen_rule import likely_rule, rule_for
from shmload._checkpoints.dtypes import TORCH_NAMES, parse_dtype
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.source import Checkpoint, Source
from shmload._checkpoints.wanted import Wanted
from shmload._compat import dtype_keyword, is_missing, missing_backends
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


class NotToBeCast(Exception):
    """The segments should have the stored dtypes."""


class Maker:
    """Builds what one call loads, and knows what it consists of; by default a single model."""

    is_of_pipelines = False
    """Whether it makes pipelines, and not single models."""
    takes_path = False
    """Whether the library gets a `Path` and not a text, which it notes in a model."""
    reads_weights = False
    """Whether building reads weights, so that they must be decoded before."""
    keeps_blocks = False
    """Whether it makes models of quantised blocks, beside which other tensors are cast."""
    uncast_rule = RAW
    """The rule of a load without conversion."""
    passes_models: bool = False
    """Whether it is given models that the user has not passed: those that are remembered."""
    left_out: Collection[str] = ()
    """Components that are passed as None because the user chose others."""

    @property
    def name(self) -> str | None:
        """Name of the class that was asked for, if another process finds it by that; else None."""
        return None

    def find(
        self, wanted: Wanted, kwargs: dict[str, Any], function: Callable[..., Any]
    ) -> tuple[Source, object]:
        """Find what is to be made, and refuse a keyword that nothing takes.

        Args:
            wanted: what to load.
            kwargs: for `from_pretrained`; changed.
            function: the public function, for errors.

        Returns:
            The source, and the dtype, in which `auto` is a name where the library needs one.

        Raises:
            UnknownArgument: nothing takes a keyword.
            ShmloadError: the source, or the dtype, is at fault.
        """
        raise NotImplementedError

    def foresee(self, source: Source) -> Source | None:
        """Return the source as the classes will take it, without an import; None if unknown."""
        return source

    def import_classes(self, source: Source) -> Source:
        """Import the classes that are needed; a second call does nothing more.

        Args:
            source: as it was found.

        Returns:
            The source as the classes take it: without components that they leave out.

        Raises:
            ArgumentError: there is no such class, or it loads something else.
        """
        raise NotImplementedError

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the probable rule of a checkpoint, without an import."""
        return likely_rule(checkpoint, dtype)

    def rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule of a checkpoint, by the classes that were imported."""
        return rule_for(checkpoint, dtype)

    def unsaid(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the beginnings of what the library logs only because of how shmload calls it.

        Args:
            kwargs: for `from_pretrained`.
        """
        return ()

    def make(self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]) -> Any:
        """Let the library build it.

        Args:
            path: of the directory to read.
            dtype: as the user gave it; None to give none.
            kwargs: the other arguments of `from_pretrained`.

        Raises:
            Exception: any error of the library.
        """
        raise NotImplementedError

    def part(self, made: Any, component: str) -> Any:
        """Return a component of what was made; None if it lacks it. A model has an empty name."""
        return made[0] if isinstance(made, tuple) else made

    def parts(self, made: Any) -> Mapping[str, Any]:
        """Return all components of what was made by name."""
        return {"": self.part(made, "")}


def as_torch(dtype: object) -> object:
    """Return torch's dtypes for names, alone or in a dict by component.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    import torch  # not at the top: a maker decides what to decode before that

    if isinstance(dtype, Mapping):
        return {name: as_torch(value) for name, value in dtype.items()}
    return None if dtype is None else getattr(torch, TORCH_NAMES[parse_dtype(dtype)])


def with_dtype(kwargs: Mapping[str, Any], dtype: object) -> dict[str, Any]:
    """Return arguments for a method of diffusers, with torch's dtype if there is one."""
    target = as_torch(dtype)
    return {**kwargs, **({} if target is None else {dtype_keyword(): target})}


# Classes that a user names -----------------------------------------------------------------------


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
