"""What goes into a view directory: links to segments and to large files, copies of small ones."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.formats.known import (
    is_of_weights,
    name_alone_in_view,
    name_in_view,
)
from shmload._checkpoints.indexes import read_json, renamed_index
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source
from shmload._host.fingerprint import Fingerprint
from shmload._host.shm import SHM_DIR
from shmload._segments.view import absolute, is_index_of_renamed
from shmload._segments.view_folder import Copied

# Configurations and tokenizers are smaller. A larger file is no configuration: it is linked.
_MAX_COPIED_NBYTES = 64 << 20
# What transformers calls the dtype of a model in its configuration, now and before.
_DTYPE_KEYS = ("dtype", "torch_dtype")


class ViewLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a view directory, by their path in it."""

    links: dict[str, str]
    """What each link leads to."""
    copies: dict[str, Copied]


def lay_out_view(
    source: Source, segments: Mapping[Path, str], rules: Mapping[str, Rule]
) -> ViewLayout:
    """Plan the files of a view directory; writes nothing.

    Files with a leading dot are left out. A folder that is no component's is linked as a whole.

    Args:
        source: what it looks like.
        segments: the name of the segment of each shard.
        rules: the rule of each component's checkpoint.

    Raises:
        CheckpointError: an index or a configuration cannot be read.
    """
    root = absolute(source.root)
    shards = {absolute(path): name for path, name in segments.items()}
    if not root.is_dir():
        name = name_alone_in_view(root.name)
        return ViewLayout(links={name: str(SHM_DIR / shards[root])}, copies={})
    components = {root / name for name in source.components}
    configs = {}
    for checkpoint in source.checkpoints:
        rule = rules[checkpoint.component]
        if rule.target and not rule.is_widening:
            configs[absolute(checkpoint.folder) / "config.json"] = TORCH_NAMES[rule.target]
    entered = components | {parent for path in shards for parent in path.parents}
    layout = ViewLayout(links={}, copies={})

    def add(folder: Path, prefix: str) -> None:
        renamed = {name_in_view(each.name) for each in shards if each.parent == folder}
        for name in sorted(os.listdir(folder)):
            path, place = folder / name, prefix + name
            shown = prefix + name_in_view(name)
            if path in shards:
                layout.links[shown] = str(SHM_DIR / shards[path])
            elif is_index_of_renamed(path, shards):
                layout.copies[shown] = _copied(path, renamed_index(path, name_in_view))
            elif name.startswith(".") or name in renamed:
                continue
            elif path.is_dir() and (path in entered or prefix):
                add(path, f"{place}/")
            elif path in configs:
                layout.copies[place] = _copied(path, _with_dtype(path, configs[path]))
            elif path.is_file() and not is_of_weights(name) and _is_small(path):
                layout.copies[place] = _copied(path)
            else:
                layout.links[place] = os.path.realpath(path)

    add(root, "")
    return layout


def _copied(path: Path, content: bytes | None = None) -> Copied:
    stamp = ":".join(map(str, Fingerprint.of(os.stat(path)).lasting))
    return Copied(path, stamp, content)


def _is_small(path: Path) -> bool:
    return os.stat(path).st_size <= _MAX_COPIED_NBYTES


def _with_dtype(path: Path, dtype: str) -> bytes | None:
    """Return a configuration that names the dtype of the segments; None if it names none.

    A library that follows the configuration would else cast the weights, and so copy them.
    """
    config = read_json(path)
    return json.dumps(config, indent=2).encode() if _set_dtype(config, dtype) else None


def _set_dtype(config: Any, dtype: str) -> bool:
    """Change the dtypes in a configuration and in those in it; return whether there were any."""
    if not isinstance(config, dict):
        return False
    has_any = False
    for key, value in config.items():
        if key in _DTYPE_KEYS and value in TORCH_NAMES.values():
            config[key] = dtype
            has_any = True
        else:
            has_any = _set_dtype(value, dtype) or has_any
    return has_any
