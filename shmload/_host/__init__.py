"""The machine: system calls, what /proc tells, files, threads, forks, the garbage collector.

Guarantee: names and locks in /dev/shm, and calls that Python's `os` lacks, are here only; their
errno becomes a typed error here. May import `errors`, `_settings` and `_wording`.
"""
