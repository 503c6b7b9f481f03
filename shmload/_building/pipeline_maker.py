"""Makes pipelines of diffusers."""

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shmload._building.keywords import CHOOSING_KEYWORDS, require_taken
from shmload._building.maker import Maker, find_class_named, require_installed, with_dtype
from shmload._checkpoints.chosen_rule import library_versions
from shmload._checkpoints.hub import find_source
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.own_dtypes import settle_dtype
from shmload._checkpoints.source import Source, components_with_weights
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.weights import has_variant
from shmload._compat import class_for_task
from shmload._host.memo import Memo
from shmload.errors import ArgumentError, SourceNotFound

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_TASKS = {
    "AutoPipelineForText2Image": "TEXT2IMAGE",
    "AutoPipelineForImage2Image": "IMAGE2IMAGE",
    "AutoPipelineForInpainting": "INPAINT",
}


class PipelineMaker(Maker):
    """Makes a pipeline by a class that the user names, or else by the one that the source names.

    Args:
        wanted: a class of pipelines, one of diffusers' that choose one (`AutoPipelineFor...`), its
            name, or None.

    Raises:
        ArgumentError: `wanted` is a class that loads no pipelines.
    """

    is_of_pipelines = True
    is_modular = False
    """Whether what was found is made by the library's modular classes, and not by this."""

    def __init__(self, wanted: object) -> None:
        if wanted is not None and not isinstance(wanted, str):
            _require_pipeline_class(wanted)
        self._wanted = wanted
        self._class: Any = None
        self._source_class = ""

    @property
    def name(self) -> str | None:
        """Name of the class in diffusers; None if the source names it, or for a user's own."""
        if self._wanted is None or isinstance(self._wanted, str):
            return self._wanted
        import diffusers

        name = str(getattr(self._wanted, "__name__", ""))
        return name if getattr(diffusers, name, None) is self._wanted else None

    def find(
        self, wanted: Wanted, kwargs: dict[str, Any], function: Callable[..., Any]
    ) -> tuple[Source, object]:
        """Find the pipeline; None is passed for the components that are not wanted."""
        found = _find_pipeline(wanted, kwargs)
        if _is_modular(self._wanted) or (self._wanted is None and found.is_modular):
            self.is_modular = True
            return found, wanted.dtype
        if found.is_modular:
            raise ArgumentError(
                f"pipeline_class is {getattr(self._wanted, '__name__', self._wanted)}, and "
                f"{wanted.source} is a modular pipeline; leave the class out"
            )
        if wanted.components is not None:
            with_weights = components_with_weights(found)
            self.left_out = with_weights.difference(wanted.components, kwargs)
        with whole_libraries():
            require_taken(kwargs, found, function, self.find_class)
        kwargs.update(dict.fromkeys(self.left_out))
        return found, settle_dtype(wanted.dtype, found, kwargs)

    def foresee(self, source: Source) -> Source | None:
        """Return the source as the class will take it; None where only the class can tell."""
        if self._wanted is None or _is_modular(self._wanted):
            return source
        if self._class is not None:
            return self._narrow(source)
        # A class of the user's may be edited at any time, so nothing is remembered of it.
        if not isinstance(self._wanted, str) or "." in self._wanted:
            return None
        known = _parts_memo(self._wanted).read()
        return without_others(source, known.names) if known else None

    def taken(self, source: Source) -> Source:
        """Return the source as the class takes it; imports the class if it is not remembered.

        Raises:
            ArgumentError, LibraryMissing: as `find_class`.
        """
        if self._class is None and self._wanted is not None and self.foresee(source) is None:
            self._class = self.find_class(source)
        return self.foresee(source) or source

    def import_classes(self, source: Source) -> Source:
        """Import the pipeline's class, those of its models, and the module that builds them.

        Raises:
            ArgumentError: there is no class of that name, or it loads no pipelines.
        """
        import diffusers
        import transformers

        import shmload._building.build  # noqa: F401 with it, torch

        self._source_class = self._source_class or source.class_name
        # Warnings from this import are not about these models.
        self._class = self.find_class(source)
        libraries = {"diffusers": diffusers, "transformers": transformers}
        for checkpoint in source.checkpoints:
            if checkpoint.library in libraries:
                getattr(libraries[checkpoint.library], checkpoint.class_name, None)
        return source if self._wanted is None else self._narrow(source)

    def find_class(self, source: Source) -> Any:
        """Return the class; by default the one that the source names. It imports diffusers.

        Its list of optional components decides which passed components count. The list of the base
        class is another one.

        Raises:
            ArgumentError: there is no such class, or it loads no pipelines.
            LibraryMissing: packages that it needs are missing.
        """
        import diffusers

        if self._wanted is None:
            found = getattr(diffusers, source.class_name, diffusers.DiffusionPipeline)
            require_installed(found)
            return found
        if isinstance(self._wanted, str):
            found = find_class_named(self._wanted, "pipeline_class", [diffusers])
            _require_pipeline_class(found)
            return found
        return self._wanted

    def _narrow(self, source: Source) -> Source:
        """Leave out what the class does not take: the library does not load it."""
        import diffusers

        is_known = getattr(diffusers, self._class.__name__, None) is self._class
        taken = _components_taken(self._class)
        if is_known:
            _remember_parts(self._class.__name__, taken)
        if self._class is diffusers.DiffusionPipeline:
            return source
        is_named = is_known and taken is not None
        class_name = self._class.__name__ if is_named else ""
        return msgspec.structs.replace(without_others(source, taken), class_name=class_name)

    def unsaid(self, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the beginnings of diffusers' warnings about what the user has not asked for."""
        reasons = {
            "You have passed a non-standard module": self.passes_models,
            "You have disabled the safety checker": "safety_checker" in self.left_out,
        }
        return tuple(text for text, holds in reasons.items() if holds)

    def make(
        self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]
    ) -> "DiffusionPipeline":
        """Let diffusers build the pipeline."""
        import diffusers

        made_by = self._class
        if self._wanted is None and any(map(kwargs.get, CHOOSING_KEYWORDS)):
            made_by = diffusers.DiffusionPipeline
        if "controlnet" in self.left_out:
            made_by = self._chosen(made_by)
        taken = _components_taken(made_by)
        # The library warns about None, too, for a component that the class does not take.
        unknown = set(self.left_out).difference(taken) if taken is not None else ()
        given = {name: value for name, value in kwargs.items() if name not in unknown}
        pipe: DiffusionPipeline = made_by.from_pretrained(path, **with_dtype(given, dtype))
        return pipe

    def _chosen(self, asked: Any) -> Any:
        """Return the class that an automatic class chooses by the source alone.

        For an automatic class `controlnet=None`, by which a component is left out, asks for
        another class than that of the source.
        """
        task = _TASKS.get(getattr(asked, "__name__", ""))
        return class_for_task(task, asked, self._source_class)

    def part(self, made: "DiffusionPipeline", component: str) -> Any:
        """Return a component; None if the pipeline has none of that name."""
        return getattr(made, component, None)

    def parts(self, made: "DiffusionPipeline") -> Mapping[str, Any]:
        """Return all components by name."""
        return components_by_name(made)


def _find_pipeline(wanted: Wanted, kwargs: Mapping[str, Any]) -> Source:
    if kwargs.get("dduf_file") and os.path.isdir(wanted.source):
        # One file in place of a directory. Releases of diffusers differ: they load it or refuse.
        root = Path(wanted.source)
        nothing: dict[str, Any] = {"class_name": "", "components": (), "checkpoints": ()}
        return Source(given=wanted.source, root=root, **nothing)
    found = find_source(wanted, kwargs)
    if not found.is_pipeline:
        raise SourceNotFound(
            wanted.source,
            "not a pipeline (no model_index.json or modular_model_index.json); use load_model for "
            "a model, and load_state_dict or view for files",
        )
    variant = wanted.variant
    if variant and not any(has_variant(found.root / name, variant) for name in found.components):
        # The library refuses it: nothing is to be decoded, nor room to be asked for.
        found = msgspec.structs.replace(found, checkpoints=())
    return found


def without_others(source: Source, taken: Collection[str] | None) -> Source:
    """Leave out the components that are not taken; None takes all."""
    if taken is None:
        return source
    return msgspec.structs.replace(
        source,
        checkpoints=tuple(each for each in source.checkpoints if each.component in taken),
        unread=tuple(name for name in source.unread if name in taken),
    )


def components_by_name(pipe: "DiffusionPipeline") -> dict[str, Any]:
    """Return a pipeline's components by name, in its order.

    Not by its property `components`, which refuses a subclass that takes fewer of them.
    """
    held = vars(pipe)
    return {name: held[name] for name in pipe.config if name in held and name[:1] != "_"}


def _components_taken(pipeline_class: Any) -> Collection[str] | None:
    """Return what a class of pipelines is made of; None for one that chooses another class."""
    from diffusers import DiffusionPipeline

    if pipeline_class is DiffusionPipeline or not issubclass(pipeline_class, DiffusionPipeline):
        return None
    # As ConfigMixin._get_init_keys.
    return inspect.signature(pipeline_class.__init__).parameters.keys()


def _require_pipeline_class(found: object) -> None:
    """Check that a value is a class that loads pipelines.

    Raises:
        ArgumentError: it is not.
    """
    # Not issubclass: a class of a program that has not imported diffusers needs no import here.
    if not isinstance(found, type):
        raise ArgumentError(f"pipeline_class is {found!r}; give a class or its name")
    require_installed(found)
    bases = {base.__name__ for base in found.__mro__}
    if bases & {"DiffusionPipeline", "ModularPipeline"} or any(
        each.startswith("AutoPipelineFor") for each in bases
    ):
        return
    hint = "; use load_model for a model" if bases & {"ModelMixin", "PreTrainedModel"} else ""
    raise ArgumentError(f"pipeline_class is {found.__name__}, which loads no pipelines{hint}")


def _is_modular(found: object) -> bool:
    """Tell whether a class that a user names, or its name, is one of modular pipelines."""
    names = (
        [found] if isinstance(found, str) else [e.__name__ for e in getattr(found, "__mro__", ())]
    )
    return any(name.endswith("ModularPipeline") for name in names)


# What classes take, remembered --------------------------------------------------------------------


class ClassParts(msgspec.Struct, frozen=True):
    """The components that a class takes: to ask the class means to import it first."""

    names: tuple[str, ...] | None
    """None for a class that chooses another one by the source."""


def _remember_parts(class_name: str, names: Collection[str] | None) -> None:
    """Write what a class is made of; if that fails, the next load imports the class first."""
    parts = ClassParts(None if names is None else tuple(sorted(names)))
    memo = _parts_memo(class_name)
    if memo.read() != parts:
        memo.write(parts)


def _parts_memo(class_name: str) -> Memo[ClassParts]:
    return Memo("classes", ClassParts, (library_versions(), class_name))


def download(repo_id: str, **kwargs: Any) -> str:
    """Bring the files of a pipeline into the hub cache; return their directory.

    Args:
        repo_id: the hub id.
        kwargs: as for `DiffusionPipeline.download`.
    """
    from diffusers import DiffusionPipeline

    # So the card comes too: by it the library finds the prior of a combined pipeline.
    return str(DiffusionPipeline.download(repo_id, **kwargs, load_connected_pipeline=True))
