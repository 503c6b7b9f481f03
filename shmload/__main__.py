"""The program `shmload`, also as `python -m shmload`: the command line, from its first moment."""

import atexit
import gc
import sys


def run() -> None:
    """Run the command line; a Ctrl-C during its import prints no traceback."""
    if sys.argv[1:2] == ["run"]:
        from shmload._templates.command import main as run_program

        run_program(sys.argv[2:])
    import signal  # not at the top: it takes as long as all that `shmload run` imports

    # End as Ctrl-C does, which leaves no part behind. What is ignored stays so, as under nohup(1).
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
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
