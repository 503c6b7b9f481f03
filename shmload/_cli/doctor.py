"""The doctor's part of the command line: `shmload doctor`."""

import click

from shmload._cli.output import as_json_option, print_json
from shmload._doctor.checks import Finding
from shmload._doctor.doctor import diagnose

_COLORS = {"ok": "green", "warn": "yellow", "bad": "red"}
_STATE_WIDTH, _NAME_WIDTH = 4, 14


@click.command("doctor")
@click.argument("source", required=False)
@as_json_option
@click.pass_context
def doctor_command(context: click.Context, source: str | None, as_json: bool) -> None:
    """Say what of this machine, and of SOURCE, slows loads down or keeps them from working.

    Changes nothing. The exit code is 1 if something is bad. A source is a pipeline's directory, one
    component's, a safetensors file, or a hub id that is in the cache; 256 MiB of it are read.
    """
    findings = []
    for finding in diagnose(source):
        findings.append(finding)
        if not as_json:
            _print(finding)  # at once: the next may take seconds
    if as_json:
        print_json(findings)
    if any(finding.state == "bad" for finding in findings):
        context.exit(1)


def _print(finding: Finding) -> None:
    state = click.style(finding.state.ljust(_STATE_WIDTH), fg=_COLORS[finding.state])
    click.echo(f"{state}  {finding.name.ljust(_NAME_WIDTH)}  {finding.detail}")
    if finding.remedy:
        click.echo(f"{'':{_STATE_WIDTH + _NAME_WIDTH + 4}}{finding.remedy}")
