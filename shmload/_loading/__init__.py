"""Loads: from a source to complete segments, and what a user can ask for without torch.

Guarantee: a load either has every segment complete, or raises and leaves nothing behind. May import
`_service` and below.
"""
