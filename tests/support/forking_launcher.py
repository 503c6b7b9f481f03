"""torchrun or accelerate's launcher, but for their ranks, which are forked.

`forking_launcher.py MODULE ARGUMENTS` is like `python -m MODULE ARGUMENTS`, as a program for
`warm_python` or by itself. The launcher, its agent, the restarts and the ranks' variables are the
libraries' own. Each rank runs the script as `__main__`, without the 4 s of imports.
"""

import atexit
import dataclasses
import importlib
import runpy
import signal
import sys

from forking_python import import_libraries
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch


def main():
    import_libraries()
    assert "shmload" not in sys.modules
    run.elastic_launch = _launch
    name = sys.argv.pop(1)
    module = run if name == run.__name__ else importlib.import_module(name)
    module.main()


def _launch(config, entrypoint):
    """Take the place of torch's `elastic_launch`, which would start the Python `entrypoint`."""
    return elastic_launch(dataclasses.replace(config, start_method="fork"), _run_script)


def _run_script(*arguments):
    """Run `-u SCRIPT ARGUMENTS` in a rank, and end as Python does."""
    atexit._clear()  # the launcher's
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # instead of the launcher's handlers
    sys.argv[:] = map(str, arguments[1:])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
