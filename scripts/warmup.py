#!/usr/bin/env python3
"""Make checkpoints resident before a server starts: `warmup.py SOURCE... && exec server`.

Exit code 0: all sources are resident. 1: some are not; stderr has the reason for each, and the
other sources are resident. 2: wrong usage. A second run reads no weights.
"""

import sys

import click

import shmload
from shmload._checkpoints.dtypes import dtype_by_component


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="Dtype that the server will ask for: bfloat16, ..., or COMPONENT=float32; repeatable.",
)
@click.option("--variant", help="File variant, such as fp16.")
@click.option(
    "--component", "components", multiple=True, help="Load only this component; repeatable."
)
@click.option("--revision", help="Branch, tag or commit of hub ids.")
@click.option("--cache-dir", help="Directory of the hub cache.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of worker processes.")
@click.option("--verify", is_flag=True, help="Recompute the digests of resident segments.")
def main(
    sources: tuple[str, ...],
    dtypes: tuple[str, ...],
    variant: str | None,
    components: tuple[str, ...],
    revision: str | None,
    cache_dir: str | None,
    workers: int | None,
    verify: bool,
) -> None:
    """Make SOURCES (directories, files or hub ids) resident in shared memory."""
    failed = 0
    for source in sources:
        try:
            report = shmload.warm(
                source,
                dtype=dtype_by_component(dtypes),
                variant=variant,
                components=components or None,
                revision=revision,
                cache_dir=cache_dir,
                workers=workers,
                verify=verify,
            )
        except Exception as exc:  # any error: the other sources are still warmed
            reason = str(exc) if isinstance(exc, shmload.ShmloadError) else f"{source}: {exc!r}"
            click.echo(f"warmup: {reason}", err=True)
            failed += 1
            continue
        if report.read_nbytes:
            click.echo(f"{source}: resident after {report.elapsed_s:.1f} s")
        else:
            click.echo(f"{source}: already resident")
        for each in report.left_out:
            click.echo(f"{source}: left to the library: {each}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
