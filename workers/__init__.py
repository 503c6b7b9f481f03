"""The worker program: reads pieces of shards, converts them, writes them into segments.

Guarantee: it runs in processes of its own and imports no torch, except for a block with a NaN. May
import `_segments` and below.
"""
