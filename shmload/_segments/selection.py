"""Chooses resident segments by what a person calls them.

a segment's name                                      that segment
the path of a file, or of a directory above it        what was decoded from there, or from copies
the URL of a source                                   what was decoded from there
`shm:NAME`, `shm:NAME@VERSION`                        all versions of a publication, or one
a model's name, such as `org/name`                    that model, in every dtype
the name that it has beside another of its name       that model, in every dtype
an id, or its first four digits or more               that model or segment
a part of a model's name that no other model has      that model, in every dtype
"""

import os
import re
from collections.abc import Iterable, Sequence

from shmload._checkpoints.identity import identify
from shmload._checkpoints.remote import is_url, mirror_home
from shmload._checkpoints.wanted import is_publication
from shmload._segments.grouping import Model
from shmload._segments.listing import SegmentInfo, segments
from shmload._segments.metadata import source_path
from shmload._segments.models import find_models
from shmload._segments.names import name_prefix, segment_name
from shmload._segments.roots import root_at, weights_below
from shmload._wording import nearest_name
from shmload.errors import AmbiguousName, SegmentNotFound

_WORD = re.compile(r"(?!safetensors)[A-Za-z][A-Za-z0-9]{3,}")  # of a name
_ID = re.compile(r"[0-9a-f]{4,30}")


def select(
    patterns: Sequence[str | os.PathLike[str]],
    found: Sequence[SegmentInfo] | None = None,
    *,
    spare_shared: bool = False,
) -> list[SegmentInfo]:
    """Choose resident segments; each once.

    Args:
        patterns: as above; none means all.
        found: the segments to choose from; None for all that are resident.
        spare_shared: of a model that is chosen by its name or id, leave out what a model that is
            not chosen has too.

    Raises:
        SegmentNotFound: a pattern matches nothing.
        AmbiguousName: a part of a name is in several models' names, or the beginning of an id in
            several ids.
    """
    found = segments() if found is None else found
    if not patterns:
        return list(found)
    chosen: dict[str, SegmentInfo] = {}
    named: dict[str, Model] = {}
    models: list[Model] | None = None
    for given in patterns:
        pattern = os.fspath(given)
        path = str(mirror_home(pattern)) if is_url(pattern) else pattern
        matching = [info for info in found if is_below(info, path)]
        matching = matching or _of_copies_below(found, path)
        if not matching:
            models = find_models(found) if models is None else models
            match = match_name(pattern, models, found)
            if isinstance(match, SegmentInfo):
                matching = [match]
            else:
                named |= {model.id: model for model in match}
        chosen |= {info.name: info for info in matching}
    others = [model for model in models or () if model.id not in named]
    kept = {info.name for model in others for info in model.segments} if spare_shared else set()
    for model in named.values():
        own = [info for info in model.segments if info.name not in kept]
        chosen |= {info.name: info for info in own or model.segments}
    return list(chosen.values())


def match_name(
    pattern: str, models: Sequence[Model], found: Iterable[SegmentInfo]
) -> list[Model] | SegmentInfo:
    """Return the models, all of one name, or the segment that a name or id means.

    Raises:
        SegmentNotFound, AmbiguousName: as `select`.
    """
    exact = [model for model in models if pattern == model.name]
    if exact:
        return exact
    longer = [model for model in models if pattern in _names_of(model)]
    if len({model.name for model in longer}) == 1:
        return longer
    if _ID.fullmatch(pattern):
        by_id = [model for model in models if model.id.startswith(pattern)]
        by_key = [info for info in found if info.name.startswith(name_prefix() + pattern)]
        if len(by_id) + len(by_key) > 1:
            ids = (*(model.id for model in by_id), *(info.name for info in by_key))
            raise AmbiguousName(pattern, ids)
        if by_id or by_key:
            return by_id or by_key[0]
    fitting = [model for model in models if pattern and pattern.casefold() in model.name.casefold()]
    names = sorted({model.name for model in fitting})
    if len(names) > 1:
        raise AmbiguousName(pattern, names)
    if not fitting:
        raise SegmentNotFound(pattern, _likely_names(pattern, models))
    return fitting


def _names_of(model: Model) -> list[str]:
    """Return a model's names beside any other models: `sd15`, `team-a/sd15` and so on."""
    root = root_at(model.source, model.variant)
    return [root.called(name) for name in root.names()]


def _likely_names(pattern: str, models: Iterable[Model]) -> list[str]:
    """Return what a pattern that fits nothing may have been meant for.

    Names, their last folders and words of names. Paths are alike by the folders that they share, so
    only those count whose last folder or file is like that of the pattern.
    """
    last = os.path.basename(pattern.rstrip(os.sep))
    found = []
    for model in models:
        found += [model.name, model.name.rpartition("/")[2]]
        if os.sep in pattern and nearest_name(last, [os.path.basename(model.source)]):
            found.append(model.source)
        found += _WORD.findall(model.name)
    return list(dict.fromkeys(found))


def _of_copies_below(found: Iterable[SegmentInfo], pattern: str) -> list[SegmentInfo]:
    """Return the segments that loads of the files at a path attach: they are of copies of these.

    Such copies are snapshots that link to one blob, and hard links. The conversion is in the name
    of a segment too, and in its header.
    """
    path = os.path.expanduser(pattern)
    try:
        files = [identify(path, os.stat(path)), *weights_below(path)]
    except (OSError, ValueError):  # no file has a zero byte in its name
        return []
    return [
        info
        for info in found
        if any(info.name == segment_name(file, info.conversion) for file in files)
    ]


def is_below(info: SegmentInfo, pattern: str) -> bool:
    """Tell whether a pattern is a segment's name, or its shard's path or a directory above it."""
    if not pattern:  # it would be the current directory
        return False
    if pattern in (info.name, info.source):  # the source as a listing shows it
        return True
    if is_publication(info.source) or is_publication(pattern):
        return info.source.startswith(f"{pattern}@")
    given, source = os.path.expanduser(pattern), source_path(info.source)
    try:
        return bool(source) and any(
            f"{resolve(source)}/".startswith(f"{resolve(given)}/")
            for resolve in (os.path.abspath, os.path.realpath)
        )
    except ValueError:  # no file has a zero byte in its name
        return False
