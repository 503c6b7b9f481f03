"""The service: a daemon with warm workers and a budget, its protocol, and its client.

Guarantee: the daemon holds nothing that a new one could not find again in /dev/shm, and no client
can hold up another. May import `_decoding` and below.
"""
