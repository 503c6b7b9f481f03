"""Segments in /dev/shm: their layout, names, locks, leases, views and removal.

Guarantee: a segment is complete before it has its name, and its tensors never change afterwards.
May import `_checkpoints` and below.
"""
