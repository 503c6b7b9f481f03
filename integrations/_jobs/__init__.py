"""The processes of a data-prep job: fork server, runners, which of them gets which item.

Guarantee: each item is computed, or has an error, whatever process dies. May import the core.
"""
