"""The options that select parts of a source."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from shmload._cli.completion import complete_dtypes


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select parts of a source."""
    for option in (
        click.option(
            "--dtype",
            "dtypes",
            multiple=True,
            shell_complete=complete_dtypes,
            help="Such as bfloat16, or COMPONENT=float32 for one component; repeatable. auto is "
            "each checkpoint's own dtype.",
        ),
        click.option("--variant", help="File variant, such as fp16."),
        click.option(
            "--component", "components", multiple=True, help="Only this component; repeatable."
        ),
        click.option("--subfolder", help="Directory in the source to read instead of its root."),
        click.option(
            "--weight-name",
            multiple=True,
            help="File to read in a directory of adapters, such as LoRAs; repeatable.",
        ),
        click.option("--revision", help="Branch, tag or commit of a hub id."),
        click.option("--cache-dir", help="Hub cache directory, if not the default."),
    ):
        command = option(command)
    return command


def given(where: dict[str, Any]) -> dict[str, Any]:
    """Return only the options that were given."""
    return {name: value for name, value in where.items() if value}


def as_arguments(dtypes: Sequence[str], where: dict[str, Any]) -> list[str]:
    """Return options as they are given on a command line.

    Args:
        dtypes: values of `--dtype`.
        where: the other options, by the names of their parameters.
    """
    values = [("dtype", dtypes)] + [
        ("component" if name == "components" else name.replace("_", "-"), value)
        for name, value in given(where).items()
    ]
    return [
        f"--{name}={each}"
        for name, value in values
        for each in ([value] if isinstance(value, str) else value)
    ]
