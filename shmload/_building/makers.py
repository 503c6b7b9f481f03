"""The makers of pipelines and of single models of diffusers and transformers."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shmload._building.classes import (
    class_made,
    components_by_name,
    components_taken,
    find_class,
    is_modular,
    name_class_of,
    reads_siblings,
    require_class,
    require_pipelines,
)
from shmload._building.maker import Maker, as_torch, is_left_to_library, with_dtype
from shmload._building.options import CHOOSING_KEYWORDS
from shmload._checkpoints.dtypes import is_auto
from shmload._checkpoints.hub import find_model, find_source
from shmload._checkpoints.library import LIBRARIES, whole_libraries
from shmload._checkpoints.rule import (
    RAW,
    Rule,
    most_common_dtype,
    rule_for,
    settle_dtype,
    wanted_dtype,
)
from shmload._checkpoints.source import Checkpoint, Source, components_with_weights
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.weights import has_variant
from shmload._compat import dtype_keyword
from shmload.errors import ArgumentError, SourceNotFound

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class PipelineMaker(Maker):
    """Makes a pipeline by a class that the user names, or else by the one that the source names.

    Args:
        wanted: a class of pipelines, one of diffusers' that choose one (`AutoPipelineFor...`), its
            name, or None.

    Raises:
        ArgumentError: `wanted` is a class that loads no pipelines.
    """

    is_of_pipelines = True

    def __init__(self, wanted: object) -> None:
        self._wanted = wanted
        self._class: Any = None if wanted is None or isinstance(wanted, str) else wanted
        if self._class is not None:
            require_pipelines(self._class)
        self._left_out: Collection[str] = ()

    def makes_modular(self, source: Source) -> bool:
        """Tell whether the library's modular classes make the pipeline, and not this."""
        return source.is_modular if self._wanted is None else is_modular(self._wanted)

    def find(self, wanted: Wanted, kwargs: dict[str, Any]) -> tuple[Source, object]:
        """Find the pipeline; None is passed for the components that are not wanted."""
        found = _find_pipeline(wanted, kwargs)
        if self.makes_modular(found):
            return found, wanted.dtype
        if found.is_modular:
            raise ArgumentError(
                f"pipeline_class is {getattr(self._wanted, '__name__', self._wanted)}, and "
                f"{wanted.source} is a modular pipeline; leave the class out"
            )
        if wanted.components is not None:
            with_weights = components_with_weights(found)
            self._left_out = with_weights.difference(wanted.components, kwargs)
            kwargs.update(dict.fromkeys(self._left_out))
        taken = found if self._class is None else self.import_classes(found)
        return taken, settle_dtype(wanted.dtype, found, kwargs)

    def import_classes(self, source: Source) -> Source:
        """Import the pipeline's class and those of its models.

        Raises:
            ArgumentError: there is no class of that name, or it loads no pipelines.
        """
        import diffusers
        import transformers

        if self._class is None:
            found: Any = self._wanted
            if isinstance(found, str):
                found = find_class(found, "pipeline_class", [diffusers])
                require_pipelines(found)
            self._class = found or getattr(
                diffusers, source.class_name, diffusers.DiffusionPipeline
            )
        # Warnings from these imports are not about these models.
        libraries = {"diffusers": diffusers, "transformers": transformers}
        for checkpoint in source.checkpoints:
            if checkpoint.library in libraries:
                getattr(libraries[checkpoint.library], checkpoint.class_name, None)
        taken = components_taken(self._class)
        return source if self._wanted is None or taken is None else _without_others(source, taken)

    def make(
        self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]
    ) -> "DiffusionPipeline":
        """Let diffusers build the pipeline."""
        import diffusers

        made_by = self._class
        if self._wanted is None and any(map(kwargs.get, CHOOSING_KEYWORDS)):
            made_by = diffusers.DiffusionPipeline
        taken = components_taken(made_by)
        # The library warns about None, too, for a component that the class does not take.
        unknown = set(self._left_out).difference(taken) if taken is not None else ()
        given = {name: value for name, value in kwargs.items() if name not in unknown}
        pipe: DiffusionPipeline = made_by.from_pretrained(path, **with_dtype(given, dtype))
        return pipe

    def component(self, made: "DiffusionPipeline", name: str) -> Any:
        """Return a component; None if the pipeline has none of that name."""
        return getattr(made, name, None)

    def components(self, made: "DiffusionPipeline") -> Mapping[str, Any]:
        """Return all components by name."""
        return components_by_name(made)


class ModelMaker(Maker):
    """Makes a model by the `from_pretrained` of a class.

    Args:
        wanted: the class, or its name. An automatic class chooses another one by the source.
        takes_path: give the library a `Path` and not a text, as the user did.

    Raises:
        ArgumentError: `wanted` cannot load models.
    """

    def __init__(self, wanted: object, *, takes_path: bool) -> None:
        self._wanted = wanted
        self.takes_path = takes_path
        self._class: Any = None
        if not isinstance(wanted, str):
            self._class = require_class(wanted, "cls")
        self._made: type | None = None

    def find(self, wanted: Wanted, kwargs: dict[str, Any]) -> tuple[Source, object]:
        """Find the model."""
        found = find_model(wanted, kwargs)
        return found, self._settle_dtype(wanted.dtype, found)

    def _settle_dtype(self, dtype: object, source: Source) -> object:
        """Return the dtype, with a name in place of `auto` for a model of diffusers.

        diffusers itself takes float32 for any text.
        """
        if not is_auto(dtype):
            return dtype
        libraries = {checkpoint.library for checkpoint in source.checkpoints}
        if not libraries.intersection(LIBRARIES):  # its files do not tell; the class does
            with whole_libraries():
                bases = self._find_class(source).__mro__
            libraries = {base.__module__.partition(".")[0] for base in bases}
        return dtype if "transformers" in libraries else most_common_dtype(source)

    def import_classes(self, source: Source) -> Source:
        """Import the model's class.

        Raises:
            ArgumentError: there is no class of that name, or it loads no models.
        """
        asked = self._find_class(source)
        if reads_siblings(asked, source):  # the library loads all of them
            return msgspec.structs.replace(source, checkpoints=())
        self._made = class_made(asked, source)
        named = [name_class_of(checkpoint, self._made) for checkpoint in source.checkpoints]
        return msgspec.structs.replace(source, checkpoints=tuple(named))

    def _find_class(self, source: Source) -> Any:
        """Return the class by which to load; it imports the libraries.

        Raises:
            ArgumentError: as `import_classes`.
        """
        if self._class is None:
            import diffusers
            import transformers

            libraries = [diffusers, transformers]
            # Both have an `AutoModel`.
            if any(checkpoint.library == "transformers" for checkpoint in source.checkpoints):
                libraries.reverse()
            self._class = find_class(str(self._wanted), "cls", libraries)
        return self._class

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule that most classes have."""
        return RAW if is_left_to_library(dtype) else super().likely_rule(checkpoint, dtype)

    def rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule of the class that `from_pretrained` makes; in doubt the raw one."""
        from shmload._building.rules import derive_rule

        if self._made is None or is_left_to_library(dtype):
            return RAW
        if checkpoint.library in LIBRARIES:
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


def _find_pipeline(wanted: Wanted, kwargs: Mapping[str, Any]) -> Source:
    found = find_source(wanted, kwargs)
    if not found.is_pipeline:
        raise SourceNotFound(
            f"{wanted.source}: not a pipeline (no model_index.json or modular_model_index.json); "
            "use load_model for a model, and load_state_dict or view for files"
        )
    variant = wanted.variant
    if variant and not any(has_variant(found.root / name, variant) for name in found.components):
        # The library refuses it: nothing is to be decoded, nor room to be asked for.
        found = msgspec.structs.replace(found, checkpoints=())
    return found


def _without_others(source: Source, taken: Collection[str]) -> Source:
    """Leave out the components that are not taken: the library does not load them."""
    return msgspec.structs.replace(
        source,
        checkpoints=tuple(each for each in source.checkpoints if each.component in taken),
        unread=tuple(name for name in source.unread if name in taken),
    )


def download(repo_id: str, **kwargs: Any) -> str:
    """Bring the files of a pipeline into the hub cache; return their directory.

    Args:
        repo_id: the hub id.
        kwargs: as for `DiffusionPipeline.download`.
    """
    from diffusers import DiffusionPipeline

    # So the card comes too: by it the library finds the prior of a combined pipeline.
    return str(DiffusionPipeline.download(repo_id, **kwargs, load_connected_pipeline=True))
