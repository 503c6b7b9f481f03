"""Devices: hooks, copies to accelerators, and which way to copy is quickest.

Guarantee: what arrives on a device has the bytes of its segment, or the load fails. May import the
core.
"""
