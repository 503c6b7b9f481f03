"""What `dtype="auto"` means: each model gets its checkpoint's own dtype.

For a model of transformers that is what transformers does: the dtype that its configuration names,
or else that of its first weight. diffusers knows no `auto` and would load float32; here a model of
diffusers gets the dtype that most bytes of its weights have.
"""

from collections.abc import Mapping
from typing import Any

from shmload._checkpoints.dtypes import AUTO, FLOATS, TORCH_NAMES, parse_dtype
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._host.descriptors import Descriptor
from shmload._host.linux import open_source
from shmload.errors import UnknownDtype

_DEFAULT = "float32"


def settle_dtype(dtype: object, source: Source) -> Any:
    """Return a wanted dtype with names in place of `auto`; another one as it is.

    Args:
        dtype: a dtype, its name, None, or a dict of these by component.
        source: what is loaded. Its headers are read, no weights.

    Returns:
        For a pipeline a dict by component. None for files without a class: their floats keep the
        dtypes that they have.

    Raises:
        CheckpointError: a header is wrong.
    """
    given = dtype if isinstance(dtype, Mapping) else {"default": dtype}
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
            settled[name] = (_own_dtype(found) if found else _named(source, name)) or _DEFAULT
    return {"default": _DEFAULT} | settled


def _is_auto(dtype: object) -> bool:
    return isinstance(dtype, str) and dtype == AUTO


def _own_dtype(checkpoint: Checkpoint) -> str | None:
    """Return torch's name of a checkpoint's dtype; None if it has no class or no floats."""
    if not checkpoint.class_name:
        return None
    if checkpoint.library == "diffusers":
        nbytes: dict[str, int] = {}
        for tensor in _floats(checkpoint):
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
        most = max(nbytes, key=lambda name: nbytes[name], default=None)
        return TORCH_NAMES[most] if most else None
    floats = [tensor.dtype for tensor in _floats(checkpoint)]
    first = next((name for name in floats if not name.startswith("F8_")), None)
    return _configured(checkpoint.config) or (TORCH_NAMES[first] if first else None)


def _named(source: Source, component: str) -> str | None:
    """Return what the configuration of a component says whose weights shmload does not read."""
    path = source.root / component / "config.json"
    return _configured(read_json(path)) if path.is_file() else None


def _configured(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a model's configuration names; None if it names none."""
    try:
        named = config.get("dtype") or config.get("torch_dtype")
        return TORCH_NAMES[parse_dtype(named)] if named else None
    except UnknownDtype:
        return None


def _floats(checkpoint: Checkpoint) -> list[TensorSpec]:
    found = []
    for path in checkpoint.shards:
        with Descriptor(open_source(path)) as shard:
            header = read_header(shard.fd, path)
        found += [tensor for tensor in header.tensors if tensor.dtype in FLOATS]
    return found
