"""Makes models and pipelines of one file of weights, by `from_single_file` of their class.

`from_single_file` casts every float of the file to one dtype (diffusers 0.35 to 0.42), after it
has given the tensors the names that the models have, and joined or split some. So the file's
tensors may be cast before: no class of diffusers 0.35 to 0.42 computes with them, which a test
watches.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._building.classes import components_by_name, find_class, require_class
from shmload._building.maker import Maker, with_dtype
from shmload._checkpoints.dtypes import is_auto
from shmload._checkpoints.hub import bring_file, find_cached, find_source
from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.rule import Rule, most_common_dtype, wanted_dtype
from shmload._checkpoints.source import INDEX, Checkpoint, Source
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._checkpoints.weights import format_with_quants, why_unread
from shmload.errors import ArgumentError

_METHOD = "from_single_file"


def bring_single_file(wanted: Wanted) -> Wanted:
    """Return what is wanted, with a path in the hub cache in place of a URL of the hub.

    Raises:
        SourceNotFound: there is no such file, or it cannot be downloaded.
    """
    found = bring_file(str(wanted.source), wanted.hub) if is_url(wanted.source) else None
    return msgspec.structs.replace(wanted, source=found) if found else wanted


def find_single_file(wanted: Wanted) -> Source:
    """Return a file as a source; without a checkpoint if only the library reads it.

    Raises:
        ArgumentError: an argument is for directories.
        CheckpointError: it is damaged, or no file of weights.
    """
    if wanted.components is not None or wanted.variant is not None:
        name = "variant" if wanted.variant is not None else "components"
        raise ArgumentError(
            f"{name} is for directories, and {wanted.source} is a file; a component that is not "
            "wanted is passed as None, such as text_encoder=None"
        )
    # Its subfolder is the one of the configuration.
    hub = Hub(local_files_only=wanted.hub.local_files_only)
    alone = msgspec.structs.replace(wanted, hub=hub)
    found = find_source(alone)
    why = why_unread(found.root)
    if why and not getattr(why, "why", ""):  # the library could only say less
        raise why
    if why:
        return msgspec.structs.replace(found, checkpoints=(), unread=("",))
    return found


class SingleFileMaker(Maker):
    """Makes a model by the `from_single_file` of a class.

    Args:
        wanted: the class, or its name in diffusers.

    Raises:
        ArgumentError: `wanted` is a class that loads no single files.
    """

    reads_weights = True
    argument = "cls"

    def __init__(self, wanted: object) -> None:
        self._wanted = wanted
        self._class: Any = None
        if not isinstance(wanted, str):
            self._class = require_class(wanted, self.argument, _METHOD)

    def find(self, wanted: Wanted, kwargs: dict[str, Any]) -> tuple[Source, object]:
        """Find the file."""
        found = find_single_file(wanted)
        if self.is_of_pipelines and format_with_quants(wanted.source):
            # What the library makes of it is its own business.
            found = msgspec.structs.replace(found, checkpoints=(), unread=("",))
        return found, self.settle_dtype(wanted.dtype, found)

    def import_classes(self, source: Source) -> Source:
        """Import the class.

        Raises:
            ArgumentError: there is no class of that name, or it loads no single files.
        """
        import diffusers
        import transformers  # whose models are refused by name

        if self._class is None:
            libraries = [diffusers, transformers]
            self._class = find_class(str(self._wanted), self.argument, libraries, _METHOD)
        return source

    def settle_dtype(self, dtype: object, source: Source) -> object:
        """Return the dtype, with a name in place of `auto`.

        Raises:
            ArgumentError: it is a dict: a file's models get one dtype.
        """
        if isinstance(dtype, Mapping):
            raise ArgumentError(f"dtype is {dtype!r}; the models of a file get one dtype")
        return most_common_dtype(source) if is_auto(dtype) else dtype

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule of all classes; without a dtype their models have float32."""
        target = wanted_dtype(dtype, "")
        return Rule(target=target) if target else Rule(target="F32", is_widening=True)

    def rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the likely rule, which no class contradicts."""
        return self.likely_rule(checkpoint, dtype)

    def make(self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]) -> Any:
        """Let diffusers build it."""
        with self._weights(path) as weights:
            return getattr(self._class, _METHOD)(weights, **with_dtype(kwargs, dtype))

    @contextlib.contextmanager
    def _weights(self, path: str | os.PathLike[str]) -> Iterator[Any]:
        """Yield what to give to `from_single_file` for a segment."""
        yield path


class SinglePipelineMaker(SingleFileMaker):
    """Makes a pipeline by the `from_single_file` of a class.

    Args:
        wanted: the class, its name in diffusers, or None for the one that `config` names.
        file: what to load.
        config: as for `from_single_file`.

    Raises:
        ArgumentError: `wanted` is a class that loads no single files, or nothing names a class.
    """

    is_of_pipelines = True
    argument = "pipeline_class"

    def __init__(self, wanted: object, file: Wanted, config: object) -> None:
        found = format_with_quants(file.source) if wanted is None else None
        if found and found.quants:
            raise ArgumentError(
                f"{file.source} is a {found.name} file, which has one model and no pipeline; load "
                f"it by load_model(cls, ..., quantization_config={found.quants.config}(...)), and "
                "give it to load_pipeline beside the pipeline's directory, such as "
                "transformer=model"
            )
        super().__init__(_class_name_in(config, file.hub) if wanted is None else wanted)

    def component(self, made: Any, name: str) -> Any:
        """Return None: which of the models come from the file is known to diffusers alone."""
        return None

    def components(self, made: Any) -> Mapping[str, Any]:
        """Return all components by name."""
        return components_by_name(made)


def _class_name_in(config: object, hub: Hub) -> str:
    """Return the class of pipelines that a configuration names.

    Raises:
        ArgumentError: there is no configuration on this machine, or it names none.
    """
    folder: Path | None = None
    if isinstance(config, str | os.PathLike):
        folder = Path(config) if os.path.isdir(config) else find_cached(str(config), hub)
    index = folder / INDEX if folder else None
    found = read_json(index).get("_class_name") if index and index.is_file() else None
    if not isinstance(found, str):
        raise ArgumentError(
            f"a file of weights names no class; give pipeline_class, such as "
            f"'StableDiffusionPipeline', or a config with a model_index.json (config is {config!r})"
        )
    return found
