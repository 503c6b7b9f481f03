"""The processes of a data-prep job: the fork server, the runners, and which runner gets which item.

Guarantee: every item gets a result or an error, whichever process dies. May import the core,
`_results`, `_devices`, and the doors `handles` and `results`.
"""
