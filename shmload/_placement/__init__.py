"""Placement: which device each module of a pipeline goes to, decided from sizes alone.

Guarantee: plain functions on values; no torch, no device, no weight byte. May import `_runtimes`
and below.
"""
