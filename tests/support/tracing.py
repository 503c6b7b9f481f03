"""Whether a test can trace system calls."""

import functools
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
