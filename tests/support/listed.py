"""Segments as a listing has them, without any memory behind them."""

from shmload._segments.listing import SegmentInfo

GIB = 1 << 30


def listed(name, **given):
    """Return a resident segment of 1 GiB that no process uses, but for what is given."""
    usual = {
        "source": "/m/model.safetensors",
        "conversion": "BF16",
        "nbytes": GIB,
        "created_at": 0.0,
        "is_leased": False,
        "is_current": True,
        "used_at": 0.0,
        "is_pinned": False,
    }
    return SegmentInfo(name=name, **usual | given)
