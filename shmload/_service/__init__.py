"""The service: a daemon with warm workers and a budget, its protocol, and its client.

Guarantee: all that lasts is in /dev/shm, where a new daemon finds it; and no client delays another.
May import `_decoding` and below.
"""
