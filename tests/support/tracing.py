"""Counts the bytes that processes read, with strace, where tracing is allowed."""

import functools
import re
import shutil
import subprocess

import pytest


@functools.cache
def can_trace():
    return (
        bool(shutil.which("strace"))
        and not subprocess.run(
            ["strace", "-f", "-o", "/dev/null", "true"],
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode
    )


needs_strace = pytest.mark.skipif(not can_trace(), reason="strace is missing or forbidden")

_READS = "preadv,preadv2,sendfile"


def noting_reads(log):
    """Return the strace prefix of a command that logs its and its children's bulk reads."""
    # The filter stops processes at these calls only. Each thread has its own file: a common file
    # splits calls of concurrent threads into two lines, and the second names no file.
    return ("strace", "-ff", "--seccomp-bpf", "-y", "-qq", "-e", f"trace={_READS}", "-o", str(log))


def noted_nbytes(log, folder):
    """Return how many bytes of a folder's files were read, from the log."""
    texts = (path.read_text() for path in log.parent.glob(f"{log.name}.*"))
    lines = (line for text in texts for line in text.splitlines() if f"<{folder}/" in line)
    return sum(int(re.search(r"= (\d+)$", line)[1]) for line in lines)
