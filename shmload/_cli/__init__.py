"""The command line: one function per command, tables for people, JSON for programs.

Guarantee: exit code 0 done, 1 failed with one line on stderr, 2 wrong usage, 130 interrupted. May
import everything.
"""
