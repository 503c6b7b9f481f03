"""Turns `redirect` on before a program begins. Python imports this file when it starts.

`shmload run --redirect` puts this folder on PYTHONPATH, so the Python processes that the program
starts come here too. Another module of this name, if there is one, is imported then.
"""

import os
import sys


def _begin() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    sys.path_importer_cache.pop(folder, None)
    way = os.environ.get("SHMLOAD_REDIRECT")
    if way:
        try:
            from shmload._redirecting.patches import redirect
        except ImportError:
            pass  # another Python than the one of `shmload run`
        else:
            redirect(verbose=way == "verbose")
    del sys.modules["sitecustomize"]
    # If there is none, Python takes the error for what it says.
    __import__("sitecustomize")


_begin()
