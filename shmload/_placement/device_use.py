"""How much of a device's memory a placement takes."""

import msgspec


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The weights on one device."""

    device: str
    nbytes: int
    """Size of the weights that are there, in bytes."""
    passing_nbytes: int
    """The most that comes there at a time of weights on `offload` or `disk`, in bytes."""
    limit_nbytes: int | None
    """How many bytes may lie there at most; None if the inventory has no limit."""
    headroom_nbytes: int
    """How many of these bytes a strategy leaves to activations; a device map may take them."""
