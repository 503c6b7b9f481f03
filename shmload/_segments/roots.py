"""Where the models of segments lie on disk, and what a person would call them.

.../models--ORG--NAME/snapshots/REVISION/unet/FILE   hub cache: ORG/NAME
.../stable-diffusion/unet/FILE                       a pipeline: its folder has its index
.../stable-diffusion/unet/NAME.fp16.safetensors      its variant: stable-diffusion:fp16
.../clip/FILE                                        a component: its folder has config.json
.../lora.safetensors                                 a file alone
.../remote/ID/trees/DIGEST/sd/unet/FILE              a bucket or web server: its URL

Paths here are texts, as headers have them (`source_text`), unless something else is said.
"""

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from shmload._checkpoints.formats.known import format_named, is_of_model, variant_of
from shmload._checkpoints.identity import Identity, identify
from shmload._checkpoints.remote import mirrors_folder, pointed_object
from shmload._checkpoints.source import INDEX, MODULAR_INDEX
from shmload._segments.metadata import source_path, source_text

_IN_HUB_CACHE = re.compile(r"(?P<root>.*/models--(?P<id>[^/]+)/snapshots/(?P<revision>[^/]+))/.+")
_REVISION_NCHARS = 7  # as git shortens it

# `model-00001-of-00003.safetensors`: a file that is never a model alone.
_NUMBERED = re.compile(r".*-\d+-of-\d+\.\w+")

# What diffusers calls components, for files that are gone and whose pipeline is gone too.
_COMPONENT = re.compile(
    r"(unet|transformer|vae|vqvae|text_encoder|image_encoder|prior|decoder|safety_checker|"
    r"controlnet|motion_adapter|feature_extractor|vocoder|language_model|projection_model)(_\w+)?"
)


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The directory or file that a model is loaded from."""

    path: str
    hub_id: str = ""
    """Such as `org/name`; empty outside a hub cache."""
    revision: str = ""
    """The snapshot's commit; empty outside a hub cache."""
    url: str = ""
    """Where its objects are; empty for files."""
    variant: str = ""
    """The variant of its files, such as `fp16`; empty for plain files."""

    @property
    def key(self) -> str:
        """What no other model has: its path, and its variant."""
        return self.called(self.path)

    def called(self, name: str) -> str:
        """Return the model's name with its variant.

        Args:
            name: of all variants together, from `names`.
        """
        return f"{name}:{self.variant}" if self.variant else name

    def component_of(self, source: str) -> str:
        """Return the component that a shard belongs to; empty for a model that has none."""
        folder = os.path.dirname(source)
        inside = folder.removeprefix(self.path).strip(os.sep) if folder != self.path else ""
        return inside.partition(os.sep)[0] if source.startswith(self.path + os.sep) else ""

    def names(self) -> Iterator[str]:
        """Yield names for it and its variants, the shortest first; the last is its path."""
        if self.hub_id:
            yield self.hub_id
            yield f"{self.hub_id}@{self.revision[:_REVISION_NCHARS]}"
        elif self.url:
            yield self.url
        else:
            folders = self.path.strip(os.sep).split(os.sep)
            yield from (os.sep.join(folders[-n:]) for n in range(1, len(folders)))
        yield self.path


def find_roots(sources: Iterable[str]) -> dict[str, Root]:
    """Return the model that each shard belongs to, by the shard's path.

    Looks for the configurations beside the shards. Where they are gone, the names have to do.
    """
    found: dict[str, Root] = {}
    find_folder = functools.cache(_root_of_folder)
    for source in sources:
        folder, name = os.path.split(source)
        variant = _variant_of(name)
        match = _IN_HUB_CACHE.fullmatch(source)
        if match:
            found[source] = root_at(match["root"], variant)
            continue
        is_gone = not _exists(source)
        is_part = _NUMBERED.fullmatch(name) is not None or (is_gone and is_of_model(name))
        above = find_folder(folder, is_part=is_part, is_gone=is_gone)
        path = above or source
        found[source] = Root(path=path, url=_url_of(path, source), variant=variant if above else "")
    return found


def root_at(path: str, variant: str) -> Root:
    """Return the root that lies at a path."""
    match = _IN_HUB_CACHE.fullmatch(os.path.join(path, "file"))
    if not match or match["root"] != path:
        return Root(path=path, variant=variant)
    repository = match["id"].replace("--", "/")
    return Root(path=path, hub_id=repository, revision=match["revision"], variant=variant)


def _url_of(root: str, source: str) -> str:
    """Return the URL of a model whose shard is an object elsewhere; empty for files."""
    if not source.startswith(f"{mirrors_folder()}{os.sep}"):
        return ""
    try:
        with open(source_path(source), "rb") as file:
            pointed = pointed_object(file.fileno())
    except (OSError, msgspec.DecodeError):  # no list has had it for a day
        return ""
    return pointed.url.removesuffix(source.removeprefix(root)) if pointed else ""


def model_names(sources: Iterable[str]) -> dict[str, str]:
    """Return the name of the model that each shard belongs to, by the shard's path."""
    roots = find_roots(sources)
    names = tell_apart({root.key: root for root in roots.values()}.values())
    return {source: names[root.key] for source, root in roots.items()}


def _variant_of(name: str) -> str:
    return (variant_of(name) or "") if is_of_model(name) else ""


def _root_of_folder(folder: str, *, is_part: bool, is_gone: bool) -> str:
    """Return the directory of a model that has a shard in this folder; empty for a file alone.

    Args:
        folder: the folder.
        is_part: the shard's name is that of a model's file in a folder of its own.
        is_gone: the shard no longer exists.
    """
    above = os.path.dirname(folder)
    for each in (folder, above):
        if any(_exists(os.path.join(each, index)) for index in (INDEX, MODULAR_INDEX)):
            return each
    if _exists(os.path.join(folder, "config.json")):
        return folder
    if is_gone and _COMPONENT.fullmatch(os.path.basename(folder)):
        return above
    return folder if is_part else ""


def _exists(text: str) -> bool:
    return os.path.exists(source_path(text))


def tell_apart(roots: Iterable[Root]) -> dict[str, str]:
    """Return a name for each model, by its `key`: the shortest ones that all differ."""
    known = list(roots)
    waiting = {root.path: list(root.names()) for root in known}
    while True:
        taken: dict[str, int] = {}
        for names in waiting.values():
            taken[names[0]] = taken.get(names[0], 0) + 1
        alike = [names for names in waiting.values() if taken[names[0]] > 1 and len(names) > 1]
        if not alike:
            return {root.key: root.called(waiting[root.path][0]) for root in known}
        for names in alike:
            del names[0]


def shards_below(root: Root) -> Mapping[str, str]:
    """Return the component of each file of weights that a model has now, by `Identity.key`.

    Links to one blob of a hub cache, and hard links, have one identity: so models that share a
    text encoder are found. A variant has the plain files of the folders that lack it.
    """
    by_folder: dict[str, list[tuple[Identity, str]]] = {}
    for each in weights_below(source_path(root.path)):
        folder, name = os.path.split(each.path)
        by_folder.setdefault(folder, []).append((each, _variant_of(name)))
    return {
        each.key: root.component_of(source_text(each.path))
        for files in by_folder.values()
        for each, variant in files
        if variant == (root.variant if any(v == root.variant for _, v in files) else "")
    }


def weights_below(path: str) -> Iterator[Identity]:
    """Yield the identity of each file of weights in a directory and in its folders.

    Takes and gives paths as Python has them. Nothing for what is a file itself, or gone.
    """
    folders = [path]
    try:
        folders += [entry.path for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in filter(format_named, os.listdir(folder)):
                file = os.path.join(folder, name)
                yield identify(file, os.stat(file))
