"""Devices: hooks, and copies to accelerators through slots of page-locked memory.

Guarantee: what arrives on a device has the bytes of its segment, or the load fails. May import the
core.
"""
