"""The table of ways to copy bytes from the host to devices.

To add one: a module with a `Way` and its tests, and here its row and its name in `Pin`. Importing
this module imports no torch: arguments are checked before the second that torch takes.
"""

from collections.abc import Callable
from typing import Literal

from shmload._devices.way import Way
from shmload.errors import ArgumentError

Pin = Literal["auto", "ring", "register", "off"]
"""How devices are fed: by one of `WAYS`, or for `auto` by the one that was quickest here."""

DEFAULT = "ring"
"""The way for `auto` where nothing can be measured. It works on every device."""


def _ring() -> Way:
    from shmload._devices.ring_way import RING

    return RING


def _register() -> Way:
    from shmload._devices.register_way import REGISTER

    return REGISTER


def _off() -> Way:
    from shmload._devices.off_way import OFF

    return OFF


WAYS: dict[str, Callable[[], Way]] = {"ring": _ring, "register": _register, "off": _off}
"""What imports each way, by its name."""


def require_pin(pin: str) -> None:
    """Check that a value of `pin` is `auto` or names one of `WAYS`.

    Raises:
        ArgumentError: it does not.
    """
    if pin not in ("auto", *WAYS):
        raise ArgumentError(f"pin is {pin!r}; it must be one of {', '.join(('auto', *WAYS))}")


def measured_ways() -> list[Way]:
    """Return the ways among which `auto` chooses."""
    return [way for way in (load() for load in WAYS.values()) if way.is_measured]
