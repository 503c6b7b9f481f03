"""What the library makes of weights, by quantising or fusing: made once, attached by all others.

The first process has the library do it, and publishes the result under a name that is made of all
that it depends on. A publication by other releases of the libraries does not fit, and is made anew.
"""

import contextlib
import copy
import enum
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shmload._building.keywords import FINDING_KEYWORDS, QUANTISING_KEYWORDS
from shmload._building.maker import Maker
from shmload._checkpoints.source import Source
from shmload._host.fingerprint import files_below, fingerprint
from shmload._segments.names import wait_turn
from shmload._segments.publications import Publication
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import CapacityError, NotPublishable, PublicationBroken, SegmentNotFound

logger = logger_of(__name__)

_DIGEST_NBYTES = 8
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_NCHARS = 60
# Of a single file. What a name in the hub leads to is not known here.
_CONFIGS = ("config", "original_config")


class _Unknown(Exception):
    """A value that may mean more than it shows."""


def load_once(
    load: Callable[[dict[str, Any]], Any],
    cls: type | str | None,
    source: Source,
    maker: Maker,
    dtype: object,
    kwargs: dict[str, Any],
) -> Any:
    """Return what a load makes; if it quantises and is to be kept, made by one process alone.

    Args:
        load: makes it, of `kwargs`.
        cls: the class that was asked for, or its name; None for the source's own.
        source: what is loaded.
        maker: of it.
        dtype: as given.
        kwargs: for `from_pretrained`.
    """
    if maker.keeps_blocks:  # its segments have the blocks
        return load(kwargs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    configs = [given[name] for name in _CONFIGS if name in given]
    # diffusers chooses a configuration by a file's keys, in the hub.
    if source.root.is_file() and "config" not in given:
        return load(kwargs)
    if not (
        given.keys() <= QUANTISING_KEYWORDS.union(FINDING_KEYWORDS, _CONFIGS)
        and all(isinstance(each, str | Path) and os.path.exists(each) for each in configs)
    ):
        return load(kwargs)
    facts = {
        "class": [type(maker).__name__, maker.name or cls, source.class_name],
        # Components that are left out are there as None.
        "components": [source.components, source.shards, source.unread, sorted(kwargs)],
        "configs": [stamps_of(Path(each)) for each in configs],
        "folders": {name: stamps_of(each) for name, each in source.folders.items()},
        "given_as": os.fspath(source.given),  # the model notes it
        "dtype": dtype,
        "given": given,
    }
    name = name_of("quantised", source.root, facts)
    if name is None:
        return load(kwargs)
    # The library adds to a configuration: the next call with it would seem to ask for another.
    own = {
        key: copy.deepcopy(value) if key in QUANTISING_KEYWORDS else value
        for key, value in kwargs.items()
    }
    return make_once(name, lambda: load(own))


def make_once(name: str, make: Callable[[], Any]) -> Any:
    """Return what has been published under a name, or make and publish it.

    Args:
        name: from `name_of`.
        make: makes a pipeline or a model. What has weights on a device, as some quantisers leave
            them, is not published.
    """
    # It does not matter much if another process is too slow, and two make it.
    with wait_turn(f"once-{_digest(name)}", settings().wait_timeout_s) as is_mine:
        # An earlier one may be of the releases that are installed here.
        for number in reversed(Publication(name).versions()):
            from shmload._building.published import load_published

            with contextlib.suppress(SegmentNotFound):
                try:
                    return load_published(Publication(name, number).source)
                except PublicationBroken as exc:
                    logger.info("%s is made again: %s", name, exc)
        made = make()
        # Not above: it imports torch and the libraries, and `make` imports them while it decodes.
        from shmload._building.publishing import publish_version

        if not is_mine or not _is_on_host(made):  # a publication is loaded to the host
            return made
        try:
            published = publish_version(made, Publication(name), is_pinned=False)
        except (NotPublishable, CapacityError) as exc:
            logger.warning("each process makes %s: %s", name, exc)
            return made
        with contextlib.suppress(SegmentNotFound):  # another load has taken its room already
            return published.load()  # the one copy; what was made goes
        return made


def _is_on_host(made: Any) -> bool:
    import torch

    parts = [made] if isinstance(made, torch.nn.Module) else vars(made).values()
    models = (part for part in parts if isinstance(part, torch.nn.Module))
    return all(
        tensor.device.type == "cpu"
        for model in models
        for tensor in itertools.chain(model.parameters(), model.buffers())
    )


def name_of(kind: str, root: Path, facts: Mapping[str, object]) -> str | None:
    """Return a name that other calls have exactly if they make the same; None if there is none.

    Args:
        kind: what is done to the weights, as a word.
        root: the directory or the file that they come from; all files below count.
        facts: what else counts.
    """
    known = {
        **facts,
        "source": os.path.realpath(root),
        "files": stamps_of(root),
        "defaults": _defaults(),
    }
    try:
        text = json.dumps(known, default=_plain, sort_keys=True)
    except (_Unknown, TypeError, ValueError):
        return None
    label = _UNFIT.sub("-", root.name).strip("-._")[:_MOST_NCHARS] or "model"
    return f"{label}.{kind}-{_digest(text)}"


def stamps_of(path: Path) -> Sequence[object]:
    """Return what changes with any change of a file, or of the files below a directory."""
    files = files_below(path) if path.is_dir() else {str(path): fingerprint(path)}
    return sorted(files.items())


def _defaults() -> list[str]:
    """Return torch's default dtype and device; those of a new process if it is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # another thread imports it
        return ["torch.float32", "cpu"]
    return [str(torch.get_default_dtype()), str(torch.get_default_device())]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).hexdigest()


def _plain(value: object) -> object:
    """Return a value for JSON that is equal exactly if this one is.

    Raises:
        _Unknown: it may mean more than it shows.
    """
    if isinstance(value, type) and value.__module__ != "__main__":
        return f"{value.__module__}.{value.__qualname__}"
    torch = sys.modules.get("torch")
    if isinstance(value, Path) or (torch and isinstance(value, torch.dtype)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__module__.partition(".")[0] in ("__main__", "builtins"):
        raise _Unknown
    return [f"{type(value).__module__}.{type(value).__qualname__}", vars(value)]
