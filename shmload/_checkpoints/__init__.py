"""Checkpoints on disk: the files of a source, their headers, the dtypes that are wanted.

Guarantee: no weight byte is read here, and nothing outside a header's bounds is believed. May
import `_placement` and below.
"""
