"""The options of `shmload run`, read without the libraries of the command line."""

import os
import sys

from shmload._templates.messages import Program
from shmload._templates.plain import flags_of_this_process
from shmload._templates.redirecting import VARIABLE

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
  --no-prepare     Do not take a pipeline that the template has loaded ahead, nor have it do so.
  --help           Show this text.
"""
_KINDS = {"-m": "module", "-c": "code"}


def main(arguments: list[str]) -> "NoReturn":
    """Run the program that the arguments after `shmload run` name."""
    name, is_verbose, is_redirected = "default", False, VARIABLE in os.environ
    prepares = True
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", *_KINDS):
        option = rest.pop(0)
        if option in ("-v", "--verbose"):
            is_verbose = True
        elif option == "--no-prepare":
            prepares = False
        elif option == "--redirect":
            is_redirected = True
        elif option == "--template" and rest:
            name = rest.pop(0)
        elif option.startswith("--template="):
            name = option.partition("=")[2]
        elif option == "--help":
            print(USAGE, end="")
            sys.exit(0)
        elif option == "--":
            break
        else:
            _fail(f"no such option: {option}")
    flags = sys.flags
    if is_redirected and (flags.ignore_environment or flags.isolated or flags.no_site):
        _fail("--redirect needs PYTHONPATH, which -E, -I and -S of Python turn off")
    way = ("verbose" if is_verbose else "1") if is_redirected else ""
    from shmload._templates.caller import run

    run(_program(rest, way, prepares), name, is_verbose)


def _program(words: list[str], redirect: str, prepares: bool) -> Program:
    """Return the program that the words after the options name."""
    if not words:
        _fail("give a SCRIPT, -m MODULE, -c CODE, or - for standard input")
    kind = _KINDS.get(words[0], "stdin" if words[0] == "-" else "script")
    if words[0] in _KINDS:
        words = words[1:]
        if not words:
            _fail(f"-{kind[0]} needs an argument")
    value, *arguments = map(os.fsencode, words)
    flags = list(map(os.fsencode, flags_of_this_process()))
    return Program(kind, value, arguments, flags, redirect, int(prepares))


def _fail(reason: str) -> "NoReturn":
    print(f"shmload run: {reason}\n\n{USAGE}", end="", file=sys.stderr)
    sys.exit(2)
