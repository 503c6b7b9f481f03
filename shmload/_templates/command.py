"""The options of `shmload run`, read without the libraries of the command line."""

import contextlib
import os
import sys

from shmload._templates.caller import run, run_plainly
from shmload._templates.identity import flags_of_this_process
from shmload._templates.messages import Program
from shmload._templates.variables import REDIRECT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

USAGE = """\
Usage: shmload run [OPTIONS] SCRIPT [ARGS...]
       shmload run [OPTIONS] -m MODULE [ARGS...]
       shmload run [OPTIONS] -c CODE [ARGS...]
       shmload run [OPTIONS] - [ARGS...]

Run a Python program in a copy of a process that has imported torch, diffusers and transformers
already. The first run starts that process; later ones save the time of the imports.

Options:
  -v, --verbose    Say on standard error if the program is run in the ordinary way, and why.
  --template NAME  Use a template of this name; the default is "default".
  --redirect       Lead `from_pretrained` of diffusers and transformers through shared memory, in
                   the program and in the Python processes that it starts.
  --help           Show this text.
  -X, -W, -O, -u and others are options of Python, but for -V, -h and -v: with one of them the
  program is run in the ordinary way.
"""
_KINDS = {"-m": "module", "-c": "code"}
_OF_PYTHON = frozenset("bBdEiIOPqRsSux")


def main(arguments: list[str]) -> "NoReturn":
    """Run the program that the arguments after `shmload run` name."""
    name, is_verbose, is_redirected = "default", False, REDIRECT in os.environ
    rest, of_python = list(arguments), []
    while rest and rest[0].startswith("-") and rest[0] not in ("-", *_KINDS):
        option = rest.pop(0)
        if taken := _option_of_python(option, rest):
            of_python += taken
        elif option in ("-v", "--verbose"):
            is_verbose = True
        elif option == "--redirect":
            is_redirected = True
        elif option == "--template" and rest:
            name = rest.pop(0)
        elif option.startswith("--template="):
            name = option.partition("=")[2]
        elif option == "--help":
            _show_usage()
        elif option == "--":
            break
        else:
            _fail(f"no such option: {option!r}")
    flags = sys.flags
    if is_redirected and (flags.ignore_environment or flags.isolated or flags.no_site):
        _fail("--redirect needs PYTHONPATH, which -E, -I and -S of Python turn off")
    way = ("verbose" if is_verbose else "1") if is_redirected else ""
    program = _program(rest, way, of_python)
    if not of_python:
        run(program, name, is_verbose)
    if is_verbose:
        print("shmload run: in the ordinary way: options of Python are given", file=sys.stderr)
    run_plainly(program)


def _option_of_python(option: str, rest: list[str]) -> list[str]:
    """Return an option if it is Python's own, with its argument, which is taken of the rest."""
    if option in ("-X", "-W") and rest:
        return [option, rest.pop(0)]
    is_one = option.startswith(("-X", "-W")) and len(option) > 2
    return [option] if is_one or _OF_PYTHON.issuperset(option[1:]) else []


def _program(words: list[str], redirect: str, of_python: list[str]) -> Program:
    """Return the program that the words after the options name.

    Args:
        words: these.
        redirect: see `Program`.
        of_python: options for Python, besides those of this process.
    """
    if not words:
        _fail("give a SCRIPT, -m MODULE, -c CODE, or - for standard input")
    kind = _KINDS.get(words[0], "stdin" if words[0] == "-" else "script")
    if words[0] in _KINDS:
        words = words[1:]
        if not words:
            _fail(f"-{kind[0]} needs an argument")
    value, *arguments = map(os.fsencode, words)
    flags = list(map(os.fsencode, [*flags_of_this_process(), *of_python]))
    return Program(kind, value, arguments, flags, redirect)


def _show_usage() -> "NoReturn":
    try:
        print(USAGE, end="", flush=True)
    except OSError as exc:
        with contextlib.suppress(OSError):  # or Python tries again at its end
            sys.stdout.close()
        sys.exit(f"shmload: the output cannot be written: {exc.strerror}")
    sys.exit(0)


def _fail(reason: str) -> "NoReturn":
    print(f"shmload run: {reason}\n\n{USAGE}", end="", file=sys.stderr)
    sys.exit(2)
