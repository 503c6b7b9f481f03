"""Every error that shmload raises, and the tree that they form.

Guarantee: each error is built from facts, says what happened, to which file or segment, and what to
do; it can be pickled, and sent over the service's socket by name. May import nothing of shmload but
`_wording`.
"""
