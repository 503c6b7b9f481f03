"""The command line as a whole, with `shmload doctor`; modules beside have the others.

Exit codes: 0 done, 1 failed (the error's text on stderr), 2 wrong usage, 130 interrupted by Ctrl-C,
SIGTERM or SIGHUP.
"""

import logging
import sys
from typing import Any

import click

import shmload
from shmload._cli import residents, service, sources, templates
from shmload._cli.output import as_json_option, is_of_output, print_json, print_page, say
from shmload._cli.sources import complete_paths, dtype_option
from shmload._loading import progress
from shmload._tables import Cell, Page, Table
from shmload.errors import ArgumentError, ShmloadError

_INTERRUPTED = 130  # as a shell counts: 128 + SIGINT


class _Group(click.Group):
    """Prints errors of shmload as one line on stderr, and sets the exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # click's own signature
        try:
            return super().main(*args, **kwargs)
        except OSError as exc:  # click itself handles a closed pipe
            what = "the output cannot be written" if is_of_output(exc) else exc.filename
            say(f"shmload: {what}: {exc.strerror or exc}" if what else f"shmload: {exc}", err=True)
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
        except KeyboardInterrupt:
            say("shmload: interrupted", err=True)
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(shmload.__version__, package_name="shmload")
@click.option("-v", "--verbose", is_flag=True, help="Log each step.")
def main(verbose: bool) -> None:
    """Load diffusion pipelines through shared memory."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s"
    )
    progress.logger.setLevel(logging.INFO)  # its lines stand in for a bar


_STYLES = {"ok": "green", "warn": "yellow", "bad": "bold"}


@main.command()
@click.argument("source", required=False, shell_complete=complete_paths)
@dtype_option
@as_json_option
@click.pass_context
def doctor(context: click.Context, source: str | None, dtype: object, as_json: bool) -> None:
    """Check what makes loads fail or slow here.

    Nine checks, with a remedy for each. With SOURCE, as for `shmload warm`, room is judged by what
    that would take. Changes nothing. The exit code is 1 if a check is bad.
    """
    from shmload._doctor import diagnose  # it reads much that no other command needs

    if dtype and source is None:
        raise click.UsageError("--dtype needs a SOURCE")
    findings = list(diagnose(source, dtype))
    if as_json:
        print_json("doctor", findings=findings)
    else:
        rows = [
            (Cell(each.state, _STYLES[each.state]), each.name, each.detail) for each in findings
        ]
        remedies = [f"{each.name}: {each.remedy}" for each in findings if each.remedy]
        if remedies:
            remedies = ["", "What helps:", *remedies]
        print_page(Page((Table(titles=("STATE", "CHECK", "FINDING"), rows=rows), *remedies)))
    if any(finding.state == "bad" for finding in findings):
        context.exit(1)


for _command in (
    sources.plan_command,
    sources.view_command,
    sources.warm_command,
    residents.list_command,
    residents.pin_command,
    residents.unpin_command,
    residents.remove_command,
    residents.save_command,
    residents.collect_command,
    residents.verify_command,
    service.serve_command,
    service.status_command,
    service.shutdown_command,
    templates.run_command,
    templates.template_group,
):
    main.add_command(_command)
