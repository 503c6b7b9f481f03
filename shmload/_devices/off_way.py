"""The way `off`: as `ring`, but no memory is pinned; for machines where pinning does harm."""

from shmload._decoding.ring import Ring
from shmload._devices.ring_way import RingCopier
from shmload._devices.runtime import Runtime
from shmload._devices.way import Copier, Way, always_possible


def _open(ring: Ring, runtime: Runtime) -> Copier:
    return RingCopier(ring, None)


OFF = Way(name="off", is_measured=False, why_not=always_possible, open=_open)
