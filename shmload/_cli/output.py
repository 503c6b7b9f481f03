"""Printing for the commands: tables for people, JSON for programs."""

import contextlib
import json
import os
import sys
import traceback

import click
import msgspec

from shmload._tables import Page
from shmload._wording import printing

SCHEMA_VERSION = 1
"""The version of all answers with --json; raised when a field goes or changes its meaning."""

as_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for a program to read."
)


def is_of_output(exc: OSError) -> bool:
    """Tell whether an error is a failed write to stdout, as on a full disk.

    If so, drop what Python still buffers: it would try again at exit and print a traceback.
    """
    frames = (frame for frame, _ in traceback.walk_tb(exc.__traceback__))
    if not any(frame.f_code is click.echo.__code__ for frame in frames):
        return False
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def print_json(command: str, **fields: object) -> None:
    """Print a command's answer as JSON; docs/operate.md describes the fields of each command.

    Args:
        command: the command's name.
        fields: what it answers.
    """
    answer = {"schema_version": SCHEMA_VERSION, "command": command, **fields}
    built = msgspec.to_builtins(answer, enc_hook=str)
    click.echo(json.dumps(built, indent=2))  # click flushes, so a failed write raises here


def say(*lines: str, err: bool = False) -> None:
    """Print lines, on stderr if `err`; what a file is called can steer no terminal."""
    click.echo("\n".join(map(printing, lines)), err=err)


def print_page(page: Page) -> None:
    """Print tables: on a terminal in colours and no wider than that, else a line for each row."""
    from rich.console import Console  # 50 ms, which no other command need wait for

    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    click.echo(page.text(Console(highlight=False) if is_terminal else None))
