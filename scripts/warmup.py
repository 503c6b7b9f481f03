#!/usr/bin/env python3
"""Make checkpoints resident before a server starts: `warmup.py SOURCE... && exec server`.

It takes what `shmload warm` takes, and ends as that does. Exit code 0: all sources are resident.
1: some are not; stderr has the reason for each, and the other sources are resident. 2: wrong usage.
A second run reads no weights.
"""

import sys

from shmload.__main__ import run

if __name__ == "__main__":
    sys.argv[1:1] = ["warm"]
    run()
