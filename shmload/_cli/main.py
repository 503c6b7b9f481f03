"""The commands on sources and segments; other commands are in modules of their own.

Exit codes: 0 done, 1 failed (the error's text on stderr), 2 wrong usage, 130 interrupted. What
SIGTERM or SIGHUP ends, ends by that signal.
"""

import ast
import logging
import os
import sys
from typing import Any

import click

import shmload
from shmload._checkpoints.dtypes import dtype_by_component
from shmload._cli import doctor, residents, serve, service, templates, top, views, warm
from shmload._cli.completion import complete_paths
from shmload._cli.ending import EndedBySignal, EndingCommand
from shmload._cli.output import as_json_option, is_of_output, print_json, print_page, say
from shmload._cli.source_options import given, source_options
from shmload._loading import progress
from shmload.errors import ArgumentError, DeviceMapMalformed, ShmloadError

_INTERRUPTED = 130  # as a shell counts: 128 + SIGINT


class _Group(click.Group):
    """Prints errors of shmload as one line on stderr, and sets the exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # click's own signature
        try:
            return super().main(*args, **kwargs)
        except OSError as exc:  # click itself handles a closed pipe
            if not is_of_output(exc):
                raise
            reason = exc.strerror or str(exc)
            say(f"shmload: the output cannot be written: {reason}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:  # click's own signature
        try:
            return super().invoke(ctx)
        except ShmloadError as exc:
            say(f"shmload: {exc}", err=True)
            ctx.exit(2 if isinstance(exc, ArgumentError) else 1)
        except MemoryError:
            say("shmload: there is no memory; free some, or see `ulimit -v`", err=True)
            ctx.exit(1)
        except EndedBySignal as exc:
            say(f"shmload: ended by {exc}", err=True)
            ctx.exit(1)  # and then `end_as_signalled`
        except KeyboardInterrupt:
            say("shmload: interrupted", err=True)
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(shmload.__version__, package_name="shmload")
@click.option("-v", "--verbose", is_flag=True, help="Log each step.")
@click.pass_context
def main(context: click.Context, verbose: bool) -> None:
    """Load diffusion pipelines through shared memory."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        context.color = False
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s"
    )
    progress.logger.setLevel(logging.INFO)  # its lines stand in for a bar


def _parse_device_map(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> object:
    """Read a device map as JSON or as the Python code that a placement is printed with."""
    if text is None:
        return None
    text = text.strip().removeprefix("device_map").lstrip(" =")
    if not text.startswith("{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError) as exc:
        raise DeviceMapMalformed(
            'it cannot be read as a dict; quote the names, as in {"vae": "cuda:1"}'
        ) from exc


@main.command()
@click.argument("source", shell_complete=complete_paths)
@source_options
@click.option("--keep", is_flag=True, help="Plan for `warm` instead of `load_pipeline`.")
@click.option(
    "--device-map",
    callback=_parse_device_map,
    help="A strategy (auto, balanced, balanced_low_0, sequential), a device, or a dict of "
    "devices by component or path; auto if only an inventory is given.",
)
@click.option(
    "--inventory",
    help="Devices to plan for, such as 2x24GiB or cuda:0=24GiB,cpu=64GiB; this machine's "
    "if only a device map is given.",
)
@as_json_option
def plan(
    source: str,
    dtypes: tuple[str, ...],
    keep: bool,
    inventory: str | None,
    device_map: object,
    as_json: bool,
    **where: Any,
) -> None:
    """Show what loading SOURCE would do; reads headers only.

    With --inventory or --device-map, show on which device each module would be.
    """
    found = shmload.plan(
        source,
        dtype=dtype_by_component(dtypes),
        keep=keep,
        inventory=inventory,
        device_map=device_map,
        **given(where),
    )
    if as_json:
        sums = {"decode_nbytes": found.decode_nbytes, "resident_nbytes": found.resident_nbytes}
        print_json("plan", plan=found, **sums)
    else:
        print_page(found.page())


@main.command(cls=EndingCommand)
@click.argument("output", default="demo-output", type=click.Path(file_okay=False))
def demo(output: str) -> None:
    """Make a small pipeline, load it in three ways, compare them, and write an image to OUTPUT."""
    from shmload.integrations.demo import run_demo

    run_demo(output)


def add_service_commands() -> None:
    """Add the commands of the other modules."""
    for command in (
        warm.warm_command,
        residents.list_command,
        residents.pin_command,
        residents.unpin_command,
        residents.remove_command,
        residents.collect_command,
        residents.verify_command,
        serve.serve_command,
        service.status_command,
        top.top_command,
        service.shutdown_command,
        doctor.doctor_command,
        templates.run_command,
        views.view_command,
        templates.template_group,
    ):
        main.add_command(command)


add_service_commands()
