"""Makes pipelines of diffusers."""

import inspect
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shmload._building.classes import find_class_named, require_installed
from shmload._building.compat import class_for_task, connected_class
from shmload._building.keywords import CHOOSING_KEYWORDS
from shmload._building.maker import Maker, with_dtype
from shmload._checkpoints.resolve import Source
from shmload._checkpoints.rule import library_versions
from shmload._host.memo import Memo
from shmload.errors import ArgumentError

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
        left_out: names of components that shmload leaves out: `None` is passed for them.

    Raises:
        ArgumentError: `wanted` is a class that loads no pipelines.
    """

    is_of_pipelines = True

    def __init__(self, wanted: object, left_out: Collection[str] = ()) -> None:
        if wanted is not None and not isinstance(wanted, str):
            _require_pipeline_class(wanted)
        self._wanted = wanted
        self.left_out = left_out
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

    def foresee(self, source: Source) -> Source | None:
        """Return the source as the class will take it; None where only the class can tell."""
        if self._wanted is None:
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

    def class_chosen(self, source: Source, kwargs: Mapping[str, Any]) -> Any:
        """Return the class of the pipeline that is made; it imports diffusers.

        Raises:
            ArgumentError, LibraryMissing: as `find_class`.
        """
        import diffusers

        found = self.find_class(source)
        is_base = self._wanted is None or found is diffusers.DiffusionPipeline
        if is_base and kwargs.get("load_connected_pipeline"):
            named = getattr(diffusers, source.class_name, None)
            return connected_class(named)
        self._source_class = self._source_class or source.class_name
        return self._chosen(found)

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
    if "DiffusionPipeline" in bases or any(each.startswith("AutoPipelineFor") for each in bases):
        return
    hint = "; use load_model for a model" if bases & {"ModelMixin", "PreTrainedModel"} else ""
    raise ArgumentError(f"pipeline_class is {found.__name__}, which loads no pipelines{hint}")


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
