"""A folder of results: its results files, journals, index, lock and facts.

A results file holds the arrays of up to `shard_items` items; its public name is a shard. `format`
says what a format of results files is, `names` which ones there are.

Guarantee: a run that was killed at any moment can go on, and nothing is counted twice. May import
the core.
"""
