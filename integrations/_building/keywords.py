"""Refuses keywords that nothing takes, before a weight is decoded.

`from_pretrained` only warns about such a keyword and ignores it, so a mistyped dtype would give
float32. Taken are the arguments of `DiffusionPipeline.from_pretrained` in any supported version,
and those of the pipeline's constructor: components and flags. The constructor is asked only about
other names than `model_index.json` has, because importing diffusers takes 3 s.

In doubt a keyword is let through, and the library decides: a class may load in its own way.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.resolve import Source
from shmload._checkpoints.wanted import named_arguments
from shmload.errors import ShmloadError, UnknownArgument

# What every `from_pretrained` of diffusers reads from its keywords or documents, in 0.35 to 0.42. A
# test compares these lists with their source.
_COMMON = frozenset(
    {
        "cache_dir",
        "device_map",
        "disable_mmap",
        "force_download",
        "from_flax",
        "local_files_only",
        "low_cpu_mem_usage",
        "max_memory",
        "mirror",
        "offload_folder",
        "offload_state_dict",
        "output_loading_info",
        "proxies",
        "quantization_config",
        "revision",
        "token",
        "use_flashpack",
        "use_safetensors",
        "variant",
    }
)
# Those of pipelines, and of their downloads, alone.
LIBRARY_KEYWORDS = _COMMON | {
    "custom_pipeline",
    "custom_revision",
    "dduf_file",
    "load_connected_pipeline",
    "provider",
    "provider_options",
    "sess_options",
    "trust_remote_code",
    "use_onnx",
}
# Those of models.
MODEL_KEYWORDS = _COMMON | {
    "dduf_entries",
    "flashpack_kwargs",
    "ignore_mismatched_sizes",
    "local_dir",
    "local_dir_use_symlinks",
    "parallel_config",
    "subfolder",
    "trust_remote_code",
    "user_agent",
}
_REFUSED = re.compile(r"__init__\(\) got an unexpected keyword argument '(\w+)'")
# With these, other classes than the source's take keywords.
_CHANGE_THE_CLASS = ("custom_pipeline", "load_connected_pipeline")


def require_taken(
    kwargs: dict[str, Any],
    source: Source,
    function: Callable[..., Any],
    find_class: Callable[[Source], Any] | None = None,
) -> None:
    """Refuse a keyword that neither shmload, the library nor the pipeline takes.

    Args:
        kwargs: what a function got beside the arguments in its signature.
        source: the pipeline.
        function: the function, for errors.
        find_class: returns the class to build from the source; None for the one that it names.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    listed = LIBRARY_KEYWORDS.union(source.components)
    if kwargs.keys() <= listed or any(map(kwargs.get, _CHANGE_THE_CLASS)):
        return
    listed = listed.union(read_json(source.root / "model_index.json"))
    unknown = kwargs.keys() - listed
    if not unknown:
        return
    chosen = (find_class or _class_of)(source)
    if chosen is None:  # the source brings its own code
        return
    from diffusers import DiffusionPipeline

    _require_listed(kwargs, listed, chosen, DiffusionPipeline, function)


def require_taken_by_model(
    kwargs: dict[str, Any], function: Callable[..., Any], find_class: Callable[[], Any]
) -> None:
    """Refuse a keyword that neither shmload, diffusers nor a model of diffusers takes.

    Models of transformers refuse it themselves: see `explained_keywords`.

    Args:
        kwargs: what a function got beside the arguments in its signature.
        function: the function, for errors.
        find_class: returns the model's class: the one that is made, where it is known.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    if kwargs.keys() <= MODEL_KEYWORDS or kwargs.get("trust_remote_code"):
        return
    chosen = find_class()
    from diffusers import ModelMixin

    _require_listed(kwargs, MODEL_KEYWORDS, chosen, ModelMixin, function)


@contextlib.contextmanager
def explained_keywords(
    kwargs: Collection[str], function: Callable[..., Any], class_name: str
) -> Iterator[None]:
    """Name the keyword that a model's constructor refuses, in place of Python's own error.

    Only the library can tell: it gives a keyword to the model's configuration or constructor.

    Args:
        kwargs: what the function got beside the arguments in its signature.
        function: the function, for errors.
        class_name: what the caller has called the class.

    Raises:
        UnknownArgument: with the nearest argument of the function.
    """
    try:
        yield
    except TypeError as exc:
        found = _REFUSED.search(str(exc))
        if isinstance(exc, ShmloadError) or found is None or found[1] not in kwargs:
            raise
        functions = [function.__qualname__, f"{class_name}.from_pretrained"]
        raise UnknownArgument(found[1], functions, named_arguments(function)) from None


def _require_listed(
    kwargs: Collection[str],
    listed: Collection[str],
    chosen: Any,
    base: Any,
    function: Callable[..., Any],
) -> None:
    """Refuse a keyword that is not listed and that the constructor of a class does not take.

    Args:
        kwargs: the keywords.
        listed: what `from_pretrained` of the base takes.
        chosen: the class. One that loads in its own way may take anything.
        base: the class of diffusers whose `from_pretrained` is known.
        function: the function, for errors.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    if getattr(chosen.from_pretrained, "__func__", None) is not base.from_pretrained.__func__:
        return
    taken = _parameters_of(chosen)
    if taken is None:
        return
    for name in sorted(set(kwargs).difference(listed, taken)):
        known = {each for each in (*listed, *taken) if not each.startswith("_")}
        raise UnknownArgument(
            name,
            [function.__qualname__, f"{chosen.__name__}.from_pretrained"],
            known | named_arguments(function),
        )


def _class_of(source: Source) -> Any:
    """Return the class that a source names; None if it brings its own code."""
    import diffusers

    return getattr(diffusers, source.class_name, None) if source.class_name else None


def _parameters_of(found: type) -> set[str] | None:
    """Return the names that a constructor takes; None if it may take any."""
    parameters = inspect.signature(found.__init__).parameters  # type: ignore[misc]
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return parameters.keys() - {"self"}
