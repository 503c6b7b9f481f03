"""Devices: hooks, copies to accelerators, and which way to copy is quickest.

Guarantee: what arrives on a device has the bytes of its segment, or the load fails. May import the
core. A way to copy is a value with a row in `ways`, a kind of device one with a row in `runtimes`.
"""
