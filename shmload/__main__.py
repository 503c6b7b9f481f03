"""The program `shmload`, also as `python -m shmload`: the command line, from its first moment."""

import atexit
import gc
import sys


def run() -> None:
    """Run the command line; a Ctrl-C during its import prints no traceback."""
    if sys.argv[1:2] == ["run"]:
        from shmload._templates.command import main as run_program

        run_program(sys.argv[2:])
    try:
        from shmload._cli.ending import end_as_signalled

        atexit.register(end_as_signalled)  # the first of all, so it runs last
        # Else the interpreter visits each object of the imported libraries once more, for 1.2 s.
        atexit.register(gc.freeze)
        from shmload._cli.main import main
    except KeyboardInterrupt:
        print("shmload: interrupted", file=sys.stderr)
        sys.exit(130)  # as every command after its import
    except (MemoryError, ImportError) as exc:
        if not isinstance(exc, MemoryError) and "failed to map segment" not in str(exc):
            raise
        sys.exit("shmload: there is no memory to start; free some, or see `ulimit -v`")
    main(prog_name="shmload")


if __name__ == "__main__":
    run()
