"""The machine: system calls, /proc, files, child processes and messages between processes.

Guarantee: names and locks in /dev/shm, and calls that Python's `os` lacks, are here only; their
errno becomes a typed error here. Nothing that arrives is unpickled, every length has a limit, and
every child is reaped. May import `errors`, `_settings` and `_wording`.
"""
