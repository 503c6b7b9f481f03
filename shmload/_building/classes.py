"""Classes that a user names, and what they make.

A user names a class by itself, by a library's name for it, or as `module.Class`.
"""

import importlib
import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from shmload._checkpoints.library import LIBRARIES
from shmload._checkpoints.source import Checkpoint, Source
from shmload._compat import class_mapped, is_missing
from shmload._wording import nearest
from shmload.errors import ArgumentError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def find_class(
    name: str, argument: str, libraries: Sequence[ModuleType], method: str = "from_pretrained"
) -> type:
    """Return the class with a name.

    Args:
        name: of a class in one of the libraries, or `module.Class`.
        argument: which names it, for the error.
        libraries: where a name without a module is looked up, in this order.
        method: by which the class loads.

    Raises:
        ArgumentError: there is no such class, or it has no such method.
        ImportError: the library's, if packages that the class needs are missing.
    """
    module_name, _, class_name = name.rpartition(".")
    homes = [_module(module_name, name, argument)] if module_name else list(libraries)
    found = next((getattr(home, class_name) for home in homes if hasattr(home, class_name)), None)
    if found is None:
        known = sorted({each for home in homes for each in dir(home) if each[:1].isupper()})
        raise ArgumentError(
            f"{argument} is {name!r}, but there is no such class in "
            f"{' or '.join(home.__name__ for home in homes)}{nearest(class_name, known)}; "
            "a class of your own can be given itself, or as 'module.Class'"
        )
    return require_class(found, argument, method)


def require_class(found: Any, argument: str, method: str = "from_pretrained") -> type:
    """Return a class, after a check that it loads by a method.

    Raises:
        ArgumentError: it is no class, or it has no such method.
        ImportError: the library's, if packages that the class needs are missing.
    """
    if isinstance(found, type) and is_missing(found):
        found()  # raises the library's own error, which names the packages
    if not isinstance(found, type) or not hasattr(found, method):
        name = getattr(found, "__name__", found)
        raise ArgumentError(f"{argument} is {name!r}, which is no class with a `{method}`")
    return found


def require_pipelines(found: Any) -> None:
    """Check that a class loads pipelines.

    Raises:
        ArgumentError: it does not.
    """
    # By their names: a class of a program that has not imported diffusers needs no import here.
    names = {base.__name__ for base in require_class(found, "pipeline_class").__mro__}
    is_automatic = any(name.startswith("AutoPipelineFor") for name in names)
    if not is_automatic and names.isdisjoint({"DiffusionPipeline", "ModularPipeline"}):
        raise ArgumentError(
            f"pipeline_class is {found.__name__}, which loads no pipelines; use load_model for a "
            "model"
        )


def is_modular(wanted: object) -> bool:
    """Tell whether a class that a user names, or its name, is one of modular pipelines."""
    bases = getattr(wanted, "__mro__", ())
    names = [wanted] if isinstance(wanted, str) else [base.__name__ for base in bases]
    return any(name.endswith("ModularPipeline") for name in names)


def name_class(found: type | str) -> str:
    """Return a name by which another process finds a pipeline's class; a name as it is.

    Raises:
        ArgumentError: no other process can import it.
    """
    import diffusers

    if isinstance(found, str):
        return found
    name: str = found.__name__
    if getattr(diffusers, name, None) is found:
        return name
    if found.__module__ == "__main__" or "." in found.__qualname__:
        raise ArgumentError(
            f"pipeline_class is {found.__qualname__} of {found.__module__}, which other processes "
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


# What they make -----------------------------------------------------------------------------------


def components_by_name(pipe: "DiffusionPipeline") -> dict[str, Any]:
    """Return a pipeline's components by name, in its order.

    Not by its property `components`, which refuses a subclass that takes fewer of them.
    """
    held = vars(pipe)
    return {name: held[name] for name in pipe.config if name in held and name[:1] != "_"}


def components_taken(pipeline_class: Any) -> Collection[str] | None:
    """Return what a class of pipelines is made of; None for one that chooses another class."""
    from diffusers import DiffusionPipeline

    if pipeline_class is DiffusionPipeline or not issubclass(pipeline_class, DiffusionPipeline):
        return None
    # As ConfigMixin._get_init_keys.
    return inspect.signature(pipeline_class.__init__).parameters.keys()


def class_made(asked: Any, source: Source) -> type | None:
    """Return the class that `from_pretrained` of a class makes from a source; None in doubt."""
    import diffusers
    import transformers

    if issubclass(asked, (diffusers.ModelMixin, transformers.PreTrainedModel)):
        found: type = asked
        return found
    if not source.checkpoints:  # the library chooses the class, and reads the weights
        return None
    config: Mapping[str, Any] = source.checkpoints[0].config
    if "auto_map" in config:  # code of the repository
        return None
    if issubclass(asked, diffusers.AutoModel):
        chosen = getattr(diffusers, str(config.get("_class_name")), None)
        return chosen if isinstance(chosen, type) else None
    return class_mapped(asked, config)


def name_class_of(checkpoint: Checkpoint, made: type | None) -> Checkpoint:
    """Name the class that is made in a checkpoint, by its library or else by its module."""
    if made is None:
        return msgspec.structs.replace(checkpoint, library="", class_name="")
    library = made.__module__.partition(".")[0]
    home = importlib.import_module(library) if library in LIBRARIES else None
    is_public = getattr(home, made.__name__, None) is made
    return msgspec.structs.replace(
        checkpoint, library=library if is_public else made.__module__, class_name=made.__name__
    )


def reads_siblings(asked: Any, source: Source) -> bool:
    """Tell whether a class also loads the folders beside the source's, such as `controlnet_1`."""
    import diffusers

    if not source.checkpoints or not issubclass(asked, diffusers.ModelMixin):
        return False
    own = getattr(asked.from_pretrained, "__func__", None)
    is_overridden = own is not diffusers.ModelMixin.from_pretrained.__func__
    return is_overridden and os.path.isdir(f"{source.checkpoints[0].folder}_1")
