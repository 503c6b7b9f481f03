"""Checkpoints on disk: the files of a source, their headers, the dtypes that are wanted.

Guarantee: a header is checked against its file before it is used, and no tensor's bytes are read
here. May import `_placement` and below.
"""
