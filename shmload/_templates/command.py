"""Run a Python program in a copy of a process that has imported torch, diffusers and transformers.

Usage: shmload run [OPTIONS] SCRIPT [ARGS...]
       shmload run [OPTIONS] -m MODULE [ARGS...]
       shmload run [OPTIONS] -c CODE [ARGS...]
       shmload run [OPTIONS] - [ARGS...]

The first run starts that process; later ones save the time of the imports.

Options:
  -v, --verbose    Say on standard error if the program is run in the ordinary way, and why.
  --redirect       Lead `from_pretrained` of diffusers and transformers through shared memory, in
                   the program and in the Python processes that it starts.
  --help           Show this text.
  After these, -X, -W, -O, -u and others are options of Python: with one of them the program is run
  in the ordinary way.
"""

# The text above is what --help prints: no library of the command line is imported here.
import sys

from shmload._templates.caller import run, run_plainly
from shmload._templates.identity import FLAGS
from shmload._templates.messages import Program
from shmload._templates.variables import first_environment, with_redirect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_KINDS = {"-m": "module", "-c": "code", "-": "stdin"}


def main(arguments: list[str]) -> "NoReturn":
    """Run the program that the arguments after `shmload run` name."""
    is_verbose = is_redirected = False
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in _KINDS:
        match rest[0]:
            case "-v" | "--verbose":
                is_verbose = True
            case "--redirect":
                is_redirected = True
            case "--help":
                print(__doc__, end="")
                sys.exit(0)
            case "--":
                del rest[0]
                break
            case option if option.startswith("--"):
                _fail(f"no such option: {option!r}")
            case _:
                break
        del rest[0]
    environment = first_environment()
    if is_redirected:
        flags = sys.flags
        if flags.ignore_environment or flags.isolated or flags.no_site:
            _fail("--redirect needs PYTHONPATH, which -E, -I and -S of Python turn off")
        environment = with_redirect(environment, "verbose" if is_verbose else "1")
    if rest and rest[0].startswith("-") and rest[0] not in _KINDS:
        if is_verbose:
            print("shmload run: in the ordinary way: options of Python are given", file=sys.stderr)
        run_plainly([*FLAGS, *rest], environment)
    run(_program(rest), environment, is_verbose)


def _program(words: list[str]) -> Program:
    """Return the program that the words after the options name."""
    if not words:
        _fail("give a SCRIPT, -m MODULE, -c CODE, or - for standard input")
    kind = _KINDS.get(words[0], "script")
    if kind in ("module", "code"):
        words = words[1:]
        if not words:
            _fail(f"-{kind[0]} needs an argument")
    return Program(kind, words[0], words[1:])


def _fail(reason: str) -> "NoReturn":
    print(f"shmload run: {reason}\n\n{__doc__}", end="", file=sys.stderr)
    sys.exit(2)
