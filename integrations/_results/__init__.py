"""A folder of results: its shards, its journal, its lock and what it says it was made from.

Guarantee: what a kill at any moment leaves can be continued, and nothing is counted twice. May
import the core.
"""
