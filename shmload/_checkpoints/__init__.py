"""Checkpoints on disk: the files of a source, their headers, the dtypes that are wanted.

Guarantee: no tensor's bytes are read here, and a header is checked against its file before it
is used. May import `_placement` and below.
"""
