"""What a caller wants loaded: one value, parsed once from the arguments of a public function.

In a path `~` is the home directory.
"""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from shmload._checkpoints.dtypes import torch_names
from shmload._wording import nearest
from shmload.errors import ArgumentError


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the hub, or in its cache, a source is; the arguments of `from_pretrained`."""

    subfolder: str | None = None
    """One component's directory in the source."""
    weight_name: str | Sequence[str] | None = None
    """The files to read of a directory that is no model's, such as one of adapters."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    cache_dir: str | Path | None = None
    """The hub cache, if not the default."""
    token: str | bool | None = None
    """For the hub."""
    local_files_only: bool = False
    """Never download."""
    force_download: bool = False
    """Download a hub id even if it is cached."""

    @property
    def folder(self) -> str:
        """`subfolder` without slashes around it; empty for the root."""
        return (self.subfolder or "").strip("/")

    @property
    def weight_names(self) -> tuple[str, ...]:
        """`weight_name` as names; none if it is not given."""
        name = self.weight_name or ()
        return (name,) if isinstance(name, str) else tuple(name)

    @property
    def where(self) -> dict[str, Any]:
        """The arguments of huggingface_hub's downloads."""
        fields = msgspec.structs.asdict(self)
        del fields["subfolder"], fields["weight_name"]
        return fields


HUB_ARGUMENTS = frozenset(Hub.__struct_fields__)
_OLDER_DTYPE = "torch_dtype"


def require_bools(**given: object) -> None:
    """Refuse what is neither True nor False: a text such as `no` would count as True.

    Raises:
        ArgumentError: an argument is of another type.
    """
    for name, value in given.items():
        if not isinstance(value, bool):
            hint = "; how long weights stay is `warm(keep_for=)`" if name == "keep" else ""
            raise ArgumentError(f"{name} is {value!r}; it must be True or False{hint}")


def named_arguments(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments in a function's signature, and the dtype's older name."""
    import inspect  # only for an error: importing it takes longer than the rest of this module

    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    return names | {_OLDER_DTYPE} if "dtype" in names else names


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A source, and which components, variant and dtype of it."""

    source: str | os.PathLike[str]
    """A path, or the id of a model on the hub."""
    dtype: object = None
    """A `torch.dtype`, its name, a dict of these by component, or None."""
    components: Collection[str] | None = None
    """Only these; None for all."""
    variant: str | None = None
    """As for `from_pretrained`, such as `fp16`."""
    hub: Hub = Hub()

    @property
    def title(self) -> str:
        """A short name of the source, for people."""
        return os.path.basename(os.path.normpath(self.source)) or str(self.source)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `load_pipeline`, as values of JSON; equal if the same is wanted.

        They mean the same to any process of this host. What is not a path they do not download
        again; they have no token.

        Raises:
            UnknownDtype: a name is not that of a dtype.
        """
        given, cache_dir = os.fspath(self.source), self.hub.cache_dir
        is_path = os.path.exists(given)
        arguments = {
            "source": os.path.abspath(given) if is_path else given,
            "dtype": torch_names(self.dtype),
            "components": None if self.components is None else sorted(set(self.components)),
            "variant": self.variant,
            "revision": self.hub.revision,
            "cache_dir": None if cache_dir is None else os.path.abspath(cache_dir),
            "local_files_only": None if is_path else True,
        }
        return {name: value for name, value in arguments.items() if value is not None}

    @classmethod
    def parse(
        cls,
        source: str | os.PathLike[str],
        dtype: object,
        components: Collection[str] | None,
        variant: str | None,
        kwargs: dict[str, Any],
        *,
        function: Callable[..., Any],
        is_pipeline: bool = False,
        has_others: bool = False,
    ) -> Self:
        """Read the arguments of a public function.

        Args:
            source: as given; a leading `~` is replaced.
            dtype: as given.
            components: as given.
            variant: as given.
            kwargs: the arguments that the function does not name. `torch_dtype`, the older name of
                `dtype`, is removed and used.
            function: the function, for errors.
            is_pipeline: the source is a pipeline, the root of its repository: no `subfolder`.
            has_others: `kwargs` also has arguments for the library; they stay in it.

        Raises:
            ArgumentError: the source is no path, or the dtype is given under both of its names.
            ArgumentError: an argument is unknown.
        """
        if not isinstance(source, str | os.PathLike):
            shown = "None" if source is None else f"a {type(source).__name__}"
            raise ArgumentError(f"source is {shown}; give a path or a hub id")
        if is_publication(source):
            raise ArgumentError(
                f"{source} is a publication: load_pipeline and load_model take it, and no other "
                f"function, such as {function.__name__}"
            )
        older = kwargs.pop(_OLDER_DTYPE, None)
        if dtype is not None and older is not None:
            raise ArgumentError(
                "dtype and torch_dtype are both given; they are two names of one argument, so give "
                "dtype only"
            )
        # A pipeline is the root of its repository.
        known = HUB_ARGUMENTS - ({"subfolder", "weight_name"} if is_pipeline else set())
        for name in () if has_others else sorted(kwargs.keys() - known):
            near = nearest(name, sorted(known | named_arguments(function)))
            raise ArgumentError(f"{function.__qualname__} has no argument {name!r}{near}")
        given = {name: kwargs[name] for name in known if kwargs.get(name) is not None}
        return cls(
            source=expand_home(source),
            dtype=older if dtype is None else dtype,
            components=components,
            variant=variant,
            hub=Hub(**given),
        )


_Given = str | os.PathLike[str]
SCHEME = "shm:"
"""How the names of publications begin."""


def is_publication(source: object) -> bool:
    """Tell whether a source is a publication's name, such as `shm:NAME` or `shm:NAME@1`."""
    return isinstance(source, str) and source.startswith(SCHEME)


def expand_home(given: _Given) -> _Given:
    """Replace a leading `~` or `~user` as a shell does, unless a path of that name exists."""
    text = os.fspath(given)
    if not text.startswith("~") or os.path.lexists(text):
        return given
    expanded = os.path.expanduser(text)
    return expanded if isinstance(given, str) else Path(expanded)
