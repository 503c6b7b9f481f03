"""Loads: from a source to complete segments, and the public functions that need no pipeline.

Guarantee: a load either has every segment complete, or raises and leaves nothing behind. May import
`_service` and below.
"""
