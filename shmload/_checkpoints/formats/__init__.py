"""Formats of checkpoint files: one module each, and `known`, the table of them.

Guarantee: what depends on a file's format is in its module; the rest of shmload asks `known`. To
add a format: write a module that makes a `Format`, add it to `known.FORMATS`, and to the table in
`tests/unit/checkpoints/test_formats.py`, which tests what every format must do. May import the
modules of `_checkpoints` that know no format (`dtypes`, `header`), and `errors`.
"""
