"""Says which weights of a load lie in no segment: each process has a copy of its own."""

import logging
from collections.abc import Mapping

import torch

from shmload._checkpoints.resolve import Source
from shmload._wording import format_nbytes, logger_of
from shmload.integrations._building.mapped import plain_tensors
from shmload.integrations._building.route import BYPASSING_KWARGS

logger = logger_of(__name__)

# Less is not worth a line: models compute small buffers of their own.
_LEAST_NBYTES = 1 << 20
# From here on it is a warning, unless the caller asked for it.
_MUCH_NBYTES = 64 << 20


def say_what_is_private(
    storages: Mapping[int, int],
    parts: Mapping[str, object],
    source: Source,
    kwargs: Mapping[str, object],
) -> None:
    """Log how many bytes of weights each component has outside of the segments, and why.

    One line, at INFO; at WARNING for 64 MiB or more that the caller has not asked for. Models that
    the caller has passed in do not count, nor do buffers that are no weights.

    Args:
        storages: the sizes of the storages outside, in bytes, by address.
        parts: the components by name.
        source: what was loaded.
        kwargs: the arguments of `from_pretrained`.
    """
    if sum(storages.values()) < _LEAST_NBYTES:
        return
    asked = [name for name in BYPASSING_KWARGS if kwargs.get(name)]
    left = dict(storages)
    found = {}
    for name, part in parts.items():
        if not isinstance(part, torch.nn.Module) or name in kwargs:
            continue
        tensors = (each for tensor in part.state_dict().values() for each in plain_tensors(tensor))
        addresses = {each.untyped_storage().data_ptr() for each in tensors if each.is_cpu}
        found[name] = sum(left.pop(each, 0) for each in addresses)
    nbytes = sum(found.values())
    if nbytes < _LEAST_NBYTES:
        return
    logger.log(
        logging.WARNING if nbytes >= _MUCH_NBYTES and not asked else logging.INFO,
        "%s: %s of its weights lie in no segment, and are private to this process: %s",
        source.given,
        format_nbytes(nbytes),
        ", ".join(
            f"{name or 'the model'} {format_nbytes(each)} ({_why(name, source, asked)})"
            for name, each in found.items()
            if each
        ),
    )


def _why(name: str, source: Source, asked: list[str]) -> str:
    if asked:
        return f"made by the library with {asked[0]}"
    if name in source.unread:
        return "its files are left to the library"
    made = {checkpoint.component for checkpoint in source.checkpoints}
    if name not in made and made != {""}:
        return "from another source"
    return "cast, joined or copied by the library"
