"""A rank's slices of a model: which elements it keeps; it reads no others.

Guarantee: ranks together have every element once, as FSDP or ZeRO-3 would have sharded it. May
import the core, `_devices` and `_building`.
"""
