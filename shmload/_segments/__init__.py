"""Segments in /dev/shm: their layout, names, locks, leases, views and removal.

The states of a segment's file. The name, the lock and the mode together are the state; nothing else
records it, so a process that dies needs no clean-up but this table.

    name       lock       mode        state                              removed by
    NAME.part  exclusive  0600        is built                           its builder
    NAME.part  exclusive  0700        is built by a private load         its builder
    NAME.part  free       0600, 0700  its builder was killed             `gc`; a load takes it over
    none       shared     0400        private: its builder's alone       the kernel
    NAME       exclusive  0600, 0700, complete, is published             nobody
                          01600
    NAME       free       0600, 0700, its builder was killed; the next   as 0400, 0500 or 01400
                          01600       to attach it makes it read-only
    NAME       shared     0500        shared, in use                     its last user
    NAME       free       0500        its last users were killed         the next to find it
    NAME       shared     0400        resident, in use                   nobody
    NAME       free       0400        resident, idle                     `evict`; for room; when
                                                                         its time is over
    NAME       any        01400       pinned: resident                   `evict` alone
    NAME       exclusive  any         is listed or removed               the lock's holder

A segment that a publication needs is resident, and `evict` and `gc` leave it until the
publication has gone.
A shared lock is a lease. `tests/faults/test_system_calls.py` kills a loader at every step from one
row to another.

Guarantee: a segment is complete before it has its name, and its tensors never change afterwards.
May import `_checkpoints` and below.
"""
