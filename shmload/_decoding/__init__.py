"""Decoding: worker processes, and the coordinator that hands out pieces and watches them.

Guarantee: a decode ends when every piece is complete, or with a typed error within a deadline. May
import `workers` (its messages, and `fill` for decodes that are too small for a process) and below.
"""
