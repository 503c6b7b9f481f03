"""Formats of checkpoint files: one module each, and `known`, the table of them.

Guarantee: everything that depends on a file's format is in its module; the rest of shmload asks
`known`. To add one: write a module that makes a `Format`, add it to `known.FORMATS`, and test it by
`tests/unit/test_formats.py`. May import the modules of `_checkpoints` that name no format.
"""
