"""The command `shmload doctor`."""

import click

from shmload._checkpoints.dtypes import dtype_by_component
from shmload._cli.completion import complete_paths
from shmload._cli.output import as_json_option, print_json
from shmload._doctor.checks import Finding
from shmload._doctor.doctor import diagnose
from shmload._wording import printing

_COLORS = {"ok": "green", "warn": "yellow", "bad": "red"}
_STATE_WIDTH, _NAME_WIDTH = 4, 14


@click.command("doctor")
@click.argument("source", required=False, shell_complete=complete_paths)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="Judge the room by SOURCE in this dtype; as for `shmload warm`.",
)
@as_json_option
@click.pass_context
def doctor_command(
    context: click.Context, source: str | None, dtypes: tuple[str, ...], as_json: bool
) -> None:
    """Check this machine, and SOURCE, for what slows loads down or makes them fail.

    Changes nothing. The exit code is 1 if a check is bad. SOURCE is a pipeline's or component's
    directory, a safetensors file, or a hub id in the cache; 256 MiB of it are read,
    and the room is judged by what `shmload warm SOURCE` would take.
    """
    findings = []
    if dtypes and source is None:
        raise click.UsageError("--dtype needs a SOURCE")
    for finding in diagnose(source, dtype_by_component(dtypes)):
        findings.append(finding)
        if not as_json:
            _print(finding)  # now: the next check may take seconds
    if as_json:
        print_json("doctor", findings=findings)
    if any(finding.state == "bad" for finding in findings):
        context.exit(1)


def _print(finding: Finding) -> None:
    state = click.style(finding.state.ljust(_STATE_WIDTH), fg=_COLORS[finding.state])
    click.echo(f"{state}  {finding.name.ljust(_NAME_WIDTH)}  {printing(finding.detail)}")
    if finding.remedy:
        click.echo(f"{'':{_STATE_WIDTH + _NAME_WIDTH + 4}}{printing(finding.remedy)}")
