"""The service: warms a list, keeps what is resident within a budget, and tells how it is doing.

Guarantee: loads never wait for it. All that lasts is in /dev/shm, where a new service finds it.
May import `_decoding` and below.
"""
