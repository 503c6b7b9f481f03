"""How to load: what `load_pipeline` and `load_model` are told beside what to load.

Of the libraries' keywords those stand here whose effect shmload has to know. All others are the
libraries' business: shmload passes them on.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shmload._checkpoints.wanted import named_arguments, require_bools
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload._wording import nearest
from shmload.errors import ArgumentError

if TYPE_CHECKING:
    from shmload._devices.destination import Destination
    from shmload._loading.progress import Callback

CONVERTED = "converted"
Keep = bool | Literal["converted"]
"""Which segments stay: none, all, or those that had to be made."""

FINDING_KEYWORDS = frozenset(
    {
        "cache_dir",
        "force_download",
        "local_files_only",
        "revision",
        "subfolder",
        "token",
        "use_safetensors",
        "variant",
    }
)
"""Decide which files are read: the models are those of the files."""
QUANTISING_KEYWORDS = frozenset({"load_in_4bit", "load_in_8bit", "quantization_config"})
"""The library quantises the weights, and makes new tensors of them."""
BYPASSING_KEYWORDS = QUANTISING_KEYWORDS | {
    "gguf_file",
    "key_mapping",
    "state_dict",
    "use_flashpack",
    "use_onnx",
}
"""The library reads other files, or makes new tensors of what it reads."""
CHOOSING_KEYWORDS = frozenset({"custom_pipeline", "load_connected_pipeline"})
"""The base class of pipelines makes another class than the source's."""

# `kepp` is as near to `keep`. Of the libraries' keywords only `device` is, to `device_map`.
_NEAR = 0.75
_THEIRS = {"device"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to load; each as `load_pipeline` takes it."""

    device_map: object
    max_memory: Mapping[Any, object] | None
    max_host_memory: float | str | None
    keep: Keep
    share: bool | None
    workers: int | None
    verify: bool
    progress: "Callback | bool | None"

    def __post_init__(self) -> None:
        """Refuse what is neither True nor False, and no number of workers.

        Raises:
            ArgumentError: an argument is of another type.
        """
        is_kept = True if self.keep == CONVERTED else self.keep
        is_shared = False if self.share is None else self.share
        require_bools(keep=is_kept, share=is_shared, verify=self.verify)
        if self.workers is not None and self.workers < 1:
            raise ArgumentError(f"workers is {self.workers}; it must be 1 or more, or None")

    def tell_recalled(self, nbytes: int) -> None:
        """Tell a function that shows progress that all is there, in bytes."""
        if callable(self.progress):
            self.progress(nbytes, nbytes)

    @property
    def devices(self) -> dict[str, Any]:
        """What says where the weights go, by name."""
        return {
            "device_map": self.device_map,
            "max_memory": self.max_memory,
            "max_host_memory": self.max_host_memory,
        }

    def destination(self, order: tuple[str, ...] = ()) -> "Destination":
        """Return where a device map leads to, with the components in the order of a pipeline."""
        # Not at the top: most loads have no device map.
        from shmload._devices.destination import Destination, parse_max_host_memory

        return Destination(
            device_map=self.device_map,
            max_memory=self.max_memory,
            max_host_nbytes=parse_max_host_memory(self.max_host_memory),
            order=order,
        )

    @property
    def leaves_on_host(self) -> bool:
        """Whether all weights are to lie on the host, with no more said about how."""
        is_plain = not (self.verify or self.tries_to_share or self.is_bounded)
        return is_plain and self.device_map is None

    @property
    def is_bounded(self) -> bool:
        """Whether memory of the host is limited."""
        return self.max_host_memory is not None

    @property
    def stay(self) -> Stay:
        """How long segments stay, unless several ranks share them."""
        return Stay.RESIDENT if self.keep else Stay.SHARED if self.share else Stay.PRIVATE

    @property
    def tries_to_share(self) -> bool:
        """Whether one of several ranks loads, and was not told otherwise."""
        may_share = self.share is None and not (self.keep or self.is_bounded)
        return may_share and local_world_size() > 1

    @property
    def may_link(self) -> bool:
        """Whether files that have the wanted dtypes get no segment, even if the others stay."""
        return self.keep == CONVERTED


def require_readable(options: Options, kwargs: dict[str, Any]) -> None:
    """Check what can be wrong with the devices whatever the source is: before a download.

    Args:
        options: how to load.
        kwargs: for `from_pretrained`; changed.

    Raises:
        ArgumentError: a value is not valid, two of them exclude each other, or a device is not
            there, as far as `Destination.require_present` tells.
    """
    # It asks for large reads instead of page faults. The workers read so in any case.
    kwargs.pop("disable_mmap", None)
    if options.device_map is None and options.max_memory is not None:
        raise ArgumentError("max_memory is for a device_map, such as 'auto'; give both")
    if options.device_map is None or any(map(kwargs.get, QUANTISING_KEYWORDS)):
        return
    options.destination().require_present()


def require_no_slip(kwargs: Collection[str], function: Callable[..., Any]) -> None:
    """Refuse a keyword that is nearly one of a function's own.

    `from_pretrained` ignores what it does not know, with a warning at most: a mistyped dtype would
    give float32.

    Args:
        kwargs: the keywords that are meant for the library.
        function: the function that got them.

    Raises:
        ArgumentError: with the nearest name of the function's.
    """
    import difflib  # 2 ms, which a load without keywords does not pay

    own = named_arguments(function)
    for name in sorted(set(kwargs) - own - _THEIRS):
        if difflib.get_close_matches(name, own, 1, _NEAR):
            near = nearest(name, sorted(own))
            raise ArgumentError(f"{function.__qualname__} has no argument {name!r}{near}")
