"""A rank's slices of a model: which elements it keeps, and reading no more than those.

Guarantee: ranks together have every element once, as FSDP or ZeRO-3 would have sharded it. May
import the core and `_devices`.
"""
