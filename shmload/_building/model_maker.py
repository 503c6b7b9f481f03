"""Makes single models of diffusers and transformers."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._building.keywords import require_taken_by_model
from shmload._building.maker import Maker, as_torch, find_class_named, require_installed
from shmload._checkpoints.chosen_rule import rule_for, wanted_dtype
from shmload._checkpoints.dtypes import AUTO
from shmload._checkpoints.hub import find_model
from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.own_dtypes import most_common_dtype
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.source import Checkpoint, Source
from shmload._checkpoints.wanted import Wanted
from shmload._compat import class_mapped, dtype_keyword
from shmload.errors import ArgumentError

_LIBRARIES = ("diffusers", "transformers")
# Classes of one name and two libraries, for which the source decides if the library is not named.
_IN_BOTH = ("diffusers.AutoModel", "transformers.AutoModel")


class ModelMaker(Maker):
    """Makes a model by the `from_pretrained` of a class.

    Args:
        wanted: the class, or its name. An automatic class chooses another one by the source.
        takes_path: give the library a `Path` and not a text, as the user did.

    Raises:
        ArgumentError: `wanted` cannot load models.
    """

    def __init__(self, wanted: object, *, takes_path: bool) -> None:
        if not isinstance(wanted, str):
            _require_model_class(wanted)
        self._wanted = wanted
        self.takes_path = takes_path
        self._class: Any = None
        self._made: type | None = None

    @property
    def name(self) -> str | None:
        """Name of the class in one of the libraries; None for a user's own.

        It has the library before it if both libraries have such a class.
        """
        import diffusers
        import transformers

        if isinstance(self._wanted, str):
            is_own = "." in self._wanted and self._wanted not in _IN_BOTH
            return None if is_own else self._wanted
        name = str(getattr(self._wanted, "__name__", ""))
        for library in (diffusers, transformers):
            if getattr(library, name, None) is self._wanted:
                full_name = f"{library.__name__}.{name}"
                return full_name if full_name in _IN_BOTH else name
        return None

    def find(
        self, wanted: Wanted, kwargs: dict[str, Any], function: Callable[..., Any]
    ) -> tuple[Source, object]:
        """Find the model."""
        found = find_model(wanted, kwargs)
        with whole_libraries():
            require_taken_by_model(kwargs, function, lambda: self.find_class_made(found))
        return found, self._settle_dtype(wanted, found)

    def _settle_dtype(self, wanted: Wanted, source: Source) -> object:
        """Return the dtype, with a name in place of `auto` for a model of diffusers.

        diffusers itself takes float32 for any text.
        """
        libraries = {checkpoint.library for checkpoint in source.checkpoints}
        is_auto = isinstance(wanted.dtype, str) and wanted.dtype == AUTO
        if not is_auto or "transformers" in libraries:
            return wanted.dtype
        if "diffusers" not in libraries:  # its files do not tell; the class does
            with whole_libraries():
                if not self.makes_diffusers(source, wanted.hub.subfolder):
                    return wanted.dtype
        return most_common_dtype(source)

    def foresee(self, source: Source) -> Source | None:
        """Return the source, if a class is to be found by its name; None if the class is here."""
        return source if isinstance(self._wanted, str) or self._class else None

    def import_classes(self, source: Source) -> Source:
        """Import the model's class, and the module that builds it.

        Raises:
            ArgumentError: there is no class of that name, or it loads no models.
        """
        import shmload._building.build  # noqa: F401 with it, torch

        self._class = self.find_class(source)
        if _reads_siblings(self._class, source):  # the library loads all of them
            return msgspec.structs.replace(source, checkpoints=())
        self._made = _class_made(self._class, source)
        named = [_name(checkpoint, self._made) for checkpoint in source.checkpoints]
        return msgspec.structs.replace(source, checkpoints=tuple(named))

    def find_class(self, source: Source) -> Any:
        """Return the class by which to load; it imports the libraries.

        Raises:
            ArgumentError: as `import_classes`.
        """
        import diffusers
        import transformers

        if not isinstance(self._wanted, str):
            return self._wanted
        libraries = [diffusers, transformers]
        # Both have an `AutoModel`.
        if any(checkpoint.library == "transformers" for checkpoint in source.checkpoints):
            libraries.reverse()
        found = find_class_named(self._wanted, "cls", libraries)
        _require_model_class(found)
        return found

    def find_class_made(self, source: Source) -> Any:
        """Return the class that an automatic class chooses, if that is known, or else the class.

        Raises:
            ArgumentError: as `import_classes`.
        """
        asked = self.find_class(source)
        return _class_made(asked, source) or asked

    def makes_diffusers(self, source: Source, subfolder: str | None) -> bool:
        """Tell whether the class makes a model of diffusers; it imports the libraries.

        Args:
            source: the model, perhaps without a checkpoint.
            subfolder: the model's directory in it.
        """
        import diffusers

        asked = self.find_class(source)
        if not issubclass(asked, diffusers.AutoModel):
            return issubclass(asked, diffusers.ModelMixin)
        config = source.root / (subfolder or "") / "config.json"
        return config.is_file() and "_class_name" in read_json(config)

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule that most classes have."""
        return RAW if is_left_to_library(dtype) else super().likely_rule(checkpoint, dtype)

    def rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule of the class that `from_pretrained` makes; in doubt the raw one."""
        from shmload._building.rules import derive_rule

        if self._made is None or is_left_to_library(dtype):
            return RAW
        if checkpoint.library in _LIBRARIES:
            return rule_for(checkpoint, dtype)
        # Not remembered: the user may edit the class.
        target = wanted_dtype(dtype, checkpoint.component)
        return derive_rule(checkpoint, target, self._made)

    def make(self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]) -> Any:
        """Let the library build the model; with `output_loading_info` it returns a tuple."""
        import diffusers

        is_of_diffusers = issubclass(self._class, (diffusers.ModelMixin, diffusers.AutoModel))
        given = dict(kwargs)
        if dtype is not None:
            keyword = dtype_keyword() if is_of_diffusers else "dtype"
            given[keyword] = dtype if is_left_to_library(dtype) else as_torch(dtype)
        return self._class.from_pretrained(Path(path) if self.takes_path else path, **given)


def is_left_to_library(dtype: object) -> bool:
    """Tell whether a dtype is no dtype: transformers' `auto`, or its dict by a model's parts."""
    return isinstance(dtype, Mapping) or (isinstance(dtype, str) and dtype == "auto")


def _require_model_class(found: object) -> None:
    """Check that a value is a class that loads models.

    Raises:
        ArgumentError: it is not.
        LibraryMissing: packages that it needs are missing.
    """
    if isinstance(found, type):
        require_installed(found)
    if not isinstance(found, type) or not hasattr(found, "from_pretrained"):
        raise ArgumentError(
            f"cls is {getattr(found, '__name__', found)!r}; give a class of models with "
            "`from_pretrained`, or its name"
        )
    bases = {base.__name__ for base in found.__mro__}
    if "DiffusionPipeline" in bases or any(each.startswith("AutoPipelineFor") for each in bases):
        raise ArgumentError(f"cls is {found.__name__}, which loads pipelines; use load_pipeline")


def _name(checkpoint: Checkpoint, made: type | None) -> Checkpoint:
    """Name the class that is made in a checkpoint, by its library or else by its module."""
    import importlib

    if made is None:
        return msgspec.structs.replace(checkpoint, library="", class_name="")
    library = made.__module__.partition(".")[0]
    home = importlib.import_module(library) if library in _LIBRARIES else None
    is_public = getattr(home, made.__name__, None) is made
    return msgspec.structs.replace(
        checkpoint, library=library if is_public else made.__module__, class_name=made.__name__
    )


def _class_made(asked: Any, source: Source) -> type | None:
    """Return the class that `from_pretrained` of a class makes from a source; None in doubt."""
    import diffusers
    import transformers

    if issubclass(asked, (diffusers.ModelMixin, transformers.PreTrainedModel)):
        found: type = asked
        return found
    if not source.checkpoints:  # the library chooses the class, and reads the weights
        return None
    config = source.checkpoints[0].config
    if "auto_map" in config:  # code of the repository
        return None
    if issubclass(asked, diffusers.AutoModel):
        if class_name := config.get("_class_name"):
            chosen = getattr(diffusers, str(class_name), None)
            return chosen if isinstance(chosen, type) else None
        asked = _listed_class(source) or transformers.AutoModel
        if isinstance(asked, type) and issubclass(asked, transformers.PreTrainedModel):
            return asked
    return class_mapped(asked, config)


def _reads_siblings(asked: Any, source: Source) -> bool:
    """Tell whether a class also loads the folders beside the source's, such as `controlnet_1`."""
    import diffusers

    if not source.checkpoints or not issubclass(asked, diffusers.ModelMixin):
        return False
    own = getattr(asked.from_pretrained, "__func__", None)
    is_overridden = own is not diffusers.ModelMixin.from_pretrained.__func__
    return is_overridden and os.path.isdir(f"{source.checkpoints[0].folder}_1")


def _listed_class(source: Source) -> Any:
    """Return the class that a pipeline's index names for a model of transformers; None if none."""
    import transformers

    index = source.root / "model_index.json"
    folder = source.checkpoints[0].folder
    if not os.path.isfile(index) or folder == source.root:
        return None
    match read_json(index).get(os.path.relpath(folder, source.root)):
        case ["transformers", str(class_name)]:
            return getattr(transformers, class_name, None)
    return None
