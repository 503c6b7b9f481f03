"""The machine: system calls, what /proc tells, files, threads, forks, the garbage collector.

Guarantee: every raw system call of shmload is here, and each errno becomes a typed error here. May
import `errors`, `_settings` and `_wording`.
"""
