"""What `dtype="auto"` means: each model gets its checkpoint's own dtype.

For a model of transformers that is what transformers does: the dtype that its configuration names,
or else that of its first weight. diffusers knows no `auto` and would load float32; here a model of
diffusers gets the dtype that most bytes of its weights have. A component whose weights shmload
leaves to the libraries gets what its configuration names.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from shmload._checkpoints.dtypes import AUTO, FLOATS, TORCH_NAMES, parse_dtype, prevailing_dtype
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.resolve import config_of
from shmload._checkpoints.source import Checkpoint, Source, no_component
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload.errors import UnknownDtype

_DEFAULT = "float32"
Floats = Sequence[tuple[str, int]]
"""The safetensors dtype and the size in bytes of each float tensor."""


def settle_dtype(dtype: object, source: Source, passed: Collection[str] = ()) -> Any:
    """Return a wanted dtype with names in place of `auto`; another one as it is.

    Args:
        dtype: a dtype, its name, None, or a dict of these by component.
        source: what is loaded. Its headers are read, no weights.
        passed: names of other components, which the caller gives to the pipeline.

    Returns:
        For a pipeline a dict by component. None for files without a class: their floats keep the
        dtypes that they have.

    Raises:
        CheckpointError: a header is wrong.
        UnknownComponent: the dict names a component that the pipeline lacks.
    """
    given = dtype if isinstance(dtype, Mapping) else {"default": dtype}
    if source.is_pipeline:
        known = {*source.components, *passed, "default"}
        for name in given:
            if name not in known:
                raise no_component(str(name), source.given, known - {"default"})
    if source.is_modular and isinstance(dtype, Mapping):
        dtype = given = {"default": None, **given}  # the library leaves the others to their classes
    if not any(map(_is_auto, given.values())):
        return dtype
    by_name = {checkpoint.component: checkpoint for checkpoint in source.checkpoints}
    if not source.is_pipeline:
        wanted = given.get("", given.get("default", _DEFAULT))
        return _own_dtype(by_name[""]) if _is_auto(wanted) else wanted
    settled = {name: value for name, value in given.items() if not _is_auto(value)}
    for name in source.components:
        if _is_auto(given.get(name, given.get("default"))):
            found = by_name.get(name)
            own = _own_dtype(found) if found else _configured(config_of(source.folder_of(name)))
            settled[name] = own or _DEFAULT
    return {"default": _DEFAULT} | settled


def most_common_dtype(source: Source) -> str:
    """Return what `auto` means for a model of diffusers: torch's name of its weights' dtype.

    Raises:
        CheckpointError: a header is wrong.
    """
    floats = [each for checkpoint in source.checkpoints for each in _floats(checkpoint)]
    return _named(prevailing_dtype(floats)) or _DEFAULT


def _is_auto(dtype: object) -> bool:
    return isinstance(dtype, str) and dtype == AUTO


def _own_dtype(checkpoint: Checkpoint) -> str | None:
    """Return torch's name of a checkpoint's dtype; None if it has no class or no floats."""
    if not checkpoint.class_name:
        return None
    if checkpoint.library == "diffusers":  # which notes none
        return _named(prevailing_dtype(_floats(checkpoint)))
    return _configured(checkpoint.config) or _first(_floats(checkpoint))


def _first(floats: Floats) -> str | None:
    """Return torch's name of the first dtype that transformers would take; None if none is."""
    return _named(next((dtype for dtype, _ in floats if not dtype.startswith("F8_")), ""))


def _named(dtype: str) -> str | None:
    return TORCH_NAMES[dtype] if dtype else None


def _configured(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a model's configuration names; None if it names none."""
    try:
        named = config.get("dtype") or config.get("torch_dtype")
        return TORCH_NAMES[parse_dtype(named)] if named else None
    except UnknownDtype:
        return None


def _floats(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    found = stored_tensors(checkpoint)
    return [(each.dtype, each.nbytes) for each in found if each.dtype in FLOATS]


def stored_tensors(checkpoint: Checkpoint) -> Iterator[TensorSpec]:
    """Yield the tensors of all shards.

    Raises:
        CheckpointError: a header is wrong.
    """
    for path in checkpoint.shards:
        with Descriptor(open_source(path)) as file:
            yield from read_header(file.fd, path).tensors
