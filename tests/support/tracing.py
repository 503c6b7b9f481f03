"""strace: what processes ask of the kernel, where that may be watched."""

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
    """Return the words before a command to have its bulk reads noted, and its children's."""
    # Only processes that make such a call are stopped at it. Each thread has a file of its own, for
    # in one for all a call whose end is noted late is torn in two, of which one names no file.
    return ("strace", "-ff", "--seccomp-bpf", "-y", "-qq", "-e", f"trace={_READS}", "-o", str(log))


def noted_nbytes(log, folder):
    """Return how many bytes of a folder's files were read."""
    texts = (path.read_text() for path in log.parent.glob(f"{log.name}.*"))
    lines = (line for text in texts for line in text.splitlines() if f"<{folder}/" in line)
    return sum(int(re.search(r"= (\d+)$", line)[1]) for line in lines)
