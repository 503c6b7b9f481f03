"""The status of a service, as a value to change for a test."""

from shmload._service.protocol import Status

STATUS = Status(
    pid=1234,
    uptime_s=7200,
    budget_nbytes=40 << 30,
    resident_nbytes=22 << 30,
    segments=9,
    pinned=0,
    waiting_for_room=2,
    reserved_nbytes=0,
    clients=3,
    hits=120,
    misses=7,
    evictions=2,
    refusals=0,
    leases=(),
    models=(),
    room_nbytes=17 << 30,
)
