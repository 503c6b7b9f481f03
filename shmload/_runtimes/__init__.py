"""Runtimes: the kinds of devices, one row each, and what a copy asks of them.

Guarantee: what is special to one kind stands in its module alone, and the table imports no torch.
May import `_host` and below.
"""
