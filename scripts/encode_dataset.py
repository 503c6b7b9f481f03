#!/usr/bin/env python3
"""Encode pictures and captions into latents and embeddings: `encode_dataset.py PIPELINE IN OUT`.

The script crops each picture in the folder IN and encodes it with the pipeline's VAE. The text
encoders encode its caption: the text file of the same name, or its row in the file `--captions`.
OUT gets shards and an index, described in docs/dataprep.md. After a kill, run it again: it
continues where it stopped.

A picture that cannot be encoded stands in the index with its error. Later runs say so and leave it
alone, unless `--retry-failed` is given.

Exit code 0: every picture is encoded, or failed in an earlier run. 1: the job failed; one line says
why. 2: wrong usage, or a folder without pictures. 3: the job is done, but pictures failed in this
run.
"""

import csv
import inspect
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import shmload
from shmload.integrations import dataprep
from shmload.integrations.results import Results, ResultsReport, continued_order

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_CAPTION_SUFFIX = ".txt"
_SOME_FAILED = 3
_SHOWN_FAILURES = 10


class Picture(NamedTuple):
    """One item of the job."""

    path: str
    size: int
    caption: str | None
    """None: it is in the text file beside the picture, if there is one."""


def encode(pipe: Any, picture: Picture) -> dict[str, Any]:
    """Return unscaled latents of shape (channels, height, width), and text embeddings.

    `text.0`, `text.1`, ... are the values that the pipeline's `encode_prompt` returns, in its
    order, without the batch axis. Without a text encoder there are none.
    """
    pixels = pipe.image_processor.preprocess(square_of(picture))
    if (width := pixels.shape[-1]) != picture.size:
        raise ValueError(
            f"the pipeline takes {width} pixels, not {picture.size}; give --size {width}"
        )
    pixels = pixels.to(pipe.vae.device, pipe.vae.dtype)
    arrays = {"latents": pipe.vae.encode(pixels).latent_dist.sample()[0]}
    if getattr(pipe, "text_encoder", None) is None:
        return arrays
    caption = caption_of(picture)
    known = inspect.signature(pipe.encode_prompt).parameters
    wanted = {
        "prompt": caption,
        "prompt_2": caption,
        "device": pipe.text_encoder.device,
        "num_images_per_prompt": 1,
        "do_classifier_free_guidance": False,
    }
    found = pipe.encode_prompt(**{name: wanted[name] for name in wanted if name in known})
    for number, embedding in enumerate(part for part in found if part is not None):
        # Position ids have no batch axis.
        arrays[f"text.{number}"] = embedding[0] if len(embedding) == 1 else embedding
    return arrays


def square_of(picture: Picture) -> "Image":
    """Return the middle of a picture as a square in RGB, turned as its camera says."""
    import numpy as np
    from PIL import Image, ImageOps

    with Image.open(picture.path) as file:
        image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I"):  # grey of 16 bits, which `convert` would clip to 255
        shades = np.clip(np.asarray(image, np.int64), 0, 0xFFFF)
        image = Image.fromarray(((shades + 128) // 257).astype(np.uint8))
    return ImageOps.fit(image.convert("RGB"), (picture.size, picture.size))


def caption_of(picture: Picture) -> str:
    """Return a picture's caption; empty if it has none."""
    if picture.caption is not None:
        return picture.caption
    text = Path(picture.path).with_suffix(_CAPTION_SUFFIX)
    try:
        return text.read_text("utf-8-sig").strip() if text.exists() else ""
    except UnicodeDecodeError as exc:
        raise ValueError(f"{text} is not UTF-8: {exc}") from exc


def find_pictures(folder: Path) -> tuple[list[str], str]:
    """Return the paths of the pictures below a folder, in order, and what is skipped."""
    found, others, links = [], Counter[str](), 0
    for where, folders, files in os.walk(folder):
        links += sum(os.path.islink(os.path.join(where, name)) for name in folders)
        for path in (Path(where, name) for name in files):
            suffix = path.suffix.lower()
            if suffix in _SUFFIXES:
                found.append(path.relative_to(folder))
            elif suffix != _CAPTION_SUFFIX:
                others[suffix or "no suffix"] += 1
    skipped = []
    if others:
        skipped.append(f"{_counted(others.total(), 'file')} ({', '.join(sorted(others))})")
    if links:
        skipped.append(f"{_counted(links, 'folder')} behind a symbolic link")
    words = ", ".join(skipped)
    if not found:
        more = f"; skipped: {words}" if words else ""
        raise click.UsageError(f"there is no picture in {folder} ({', '.join(_SUFFIXES)}){more}")
    names = [str(path) for path in sorted(found)]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as exc:
            raw = os.fsencode(name)
            raise click.UsageError(f"the name {raw!r} in {folder} is not UTF-8; rename it") from exc
    return names, words


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def encoders_of(pipeline: str) -> tuple[str, ...]:
    """Return the VAE and the text encoders that a pipeline's index lists."""
    index = Path(pipeline, "model_index.json")
    try:
        if not Path(pipeline).is_dir():
            from huggingface_hub import hf_hub_download

            index = Path(hf_hub_download(pipeline, index.name))
        listed = json.loads(index.read_text("utf-8"))
        found = [name for name, entry in listed.items() if isinstance(entry, list) and entry[0]]
    except Exception:  # shmload says what is wrong with the source
        return ("vae",)
    return tuple(name for name in found if name == "vae" or name.startswith("text_encoder"))


def rows_of(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table of captions: .csv, .tsv, .jsonl, or .parquet."""
    match file.suffix.lower():
        case ".parquet":
            import pyarrow.parquet

            try:
                yield from pyarrow.parquet.read_table(file).to_pylist()
            except (pyarrow.ArrowException, OSError, IndexError) as exc:
                raise ValueError(str(exc)) from exc
        case ".jsonl":
            with file.open(encoding="utf-8-sig") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _object_of(line, number)
        case ".csv" | ".tsv" as suffix:
            with file.open(encoding="utf-8-sig", newline="") as lines:
                yield from csv.DictReader(lines, delimiter="\t" if suffix == ".tsv" else ",")
        case _:
            raise click.UsageError(
                f"{file} is no table of captions: its name must end in .csv, .tsv, .jsonl or "
                ".parquet"
            )


def _object_of(line: str, number: int) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as exc:
        raise ValueError(f"line {number}, column {exc.colno}: {exc.msg}") from exc
    if not isinstance(row, dict):
        raise ValueError(f"line {number}: it is no object of JSON")
    return row


def read_captions(file: Path, name_column: str, text_column: str) -> dict[str, str]:
    """Return the captions in a table by the picture's path below the folder."""
    try:
        rows = list(rows_of(file))
    except (ValueError, ImportError, csv.Error) as exc:
        raise click.UsageError(f"{file} cannot be read: {exc}") from exc
    captions: dict[str, str] = {}
    for number in range(1, len(rows) + 1):
        name, text = (_cell(file, rows, number, column) for column in (name_column, text_column))
        if captions.setdefault(name, text) != text:
            raise click.UsageError(
                f"{file}, row {number}: {name!r} has the caption {text!r}, and {captions[name]!r} "
                "in an earlier row; leave one"
            )
    return captions


def _cell(file: Path, rows: Sequence[Mapping[str, Any]], number: int, column: str) -> str:
    """Return a text of a row, counted from 1; empty if the cell is."""
    row = rows[number - 1]
    if column not in row:
        has = (
            f"row {number} has no"
            if any(column in other for other in rows)
            else "there is no column"
        )
        raise click.UsageError(f"{file}: {has} {column!r}; it has {', '.join(map(str, row))}")
    value = row[column]
    if value is None or (isinstance(value, float) and math.isnan(value)):  # as pandas writes None
        return ""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise click.UsageError(
            f"{file}, row {number}: {column!r} is {value!r}, a {kind}; give text"
        )
    return value.strip()


def captions_for(names: Sequence[str], captions: Mapping[str, str], table: Path) -> dict[str, str]:
    """Return the captions of pictures by name, and say which have none.

    Args:
        names: of the pictures.
        captions: by name, as the table has them.
        table: its file, for messages.
    """
    without = [name for name in names if not captions.get(name)]
    if without:
        first = f"{table} has no caption for {without[0]}"
        if not any(name in captions for name in names):
            example = (
                f"it has {next(iter(captions))!r}, for instance" if captions else "it is empty"
            )
            raise click.UsageError(
                f"{first}, nor for any other picture; {example}; see --file-column"
            )
        click.echo(f"{first}; without one: {len(without)} of {len(names)}", err=True)
    return {name: captions.get(name, "") for name in names}


def report_on(report: ResultsReport) -> int:
    """Say what is in the folder and which pictures failed; return the exit code."""
    click.echo(
        f"{report.folder}: {report.items} pictures, {report.added} of them in this run, "
        f"{report.failed} failed, {report.nbytes / 1e6:.1f} MB in {report.shards} shards"
    )
    if report.failed_before:
        failed = Results(report.folder).errors
        click.echo(f"{report.failed_before} failed in an earlier run; try again: --retry-failed")
        for key in list(failed)[:_SHOWN_FAILURES]:
            click.echo(f"  {key}: {failed[key]}")
        if len(failed) > _SHOWN_FAILURES:
            click.echo(f"  and {len(failed) - _SHOWN_FAILURES} more in {report.folder}/index.jsonl")
    return _SOME_FAILED if report.failed > report.failed_before else 0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("pipeline")
@click.argument("pictures", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--procs", default=4, show_default=True, type=click.IntRange(min=0))
@click.option("--dtype", default="bfloat16", show_default=True, help="Dtype of the models.")
@click.option("--save-dtype", help="Dtype of what is stored; as computed if not given.")
@click.option(
    "--size",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    help="Width and height of a picture, in pixels.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Only the first pictures, by path.")
@click.option(
    "--captions",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Table of captions: .csv, .tsv, .jsonl or .parquet. Else: text files beside the pictures.",
)
@click.option("--caption-column", default="text", show_default=True)
@click.option(
    "--file-column",
    default="file_name",
    show_default=True,
    help="Column with the picture's path below the folder.",
)
@click.option(
    "--component",
    "components",
    multiple=True,
    help="Model to load; repeatable. Else: the VAE and all text encoders.",
)
@click.option(
    "--devices",
    default="cpu",
    show_default=True,
    help="cpu, a list such as cuda:0,cuda:1, or round-robin for all GPUs.",
)
@click.option(
    "--threads",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Threads of each process.",
)
@click.option(
    "--shard-items",
    default=1000,
    show_default=True,
    type=click.IntRange(min=1, max=10_000),
    help="Pictures in each shard.",
)
@click.option(
    "--format",
    default="safetensors",
    show_default=True,
    type=click.Choice(["safetensors", "parquet", "webdataset"]),
    help="Format of the shards.",
)
@click.option("--retry-failed", is_flag=True, help="Try pictures again that failed earlier.")
def main(
    pipeline: str,
    pictures: Path,
    out: Path,
    size: int,
    limit: int | None,
    captions: Path | None,
    caption_column: str,
    file_column: str,
    components: tuple[str, ...],
    devices: str,
    **options: Any,
) -> None:
    """Encode the PICTURES of a folder with a PIPELINE (directory or hub id) into the folder OUT."""
    found, skipped = find_pictures(pictures)
    if skipped:
        click.echo(f"skipped: {skipped}", err=True)
    names = found[:limit]
    facts = {"size": str(size)}
    texts: Mapping[str, str] | None = None
    if captions:
        texts = captions_for(names, read_captions(captions, file_column, caption_column), captions)
        facts["captions"] = caption_column
    try:
        names = continued_order(out, names)
        if gone := sorted(set(names).difference(found)):
            more = f" and {len(gone) - 1} more" if gone[1:] else ""
            click.echo(f"not in {pictures} any more: {gone[0]}{more}; results stay", err=True)
        items = [
            Picture(str(pictures / name), size, None if texts is None else texts.get(name, ""))
            for name in names
        ]
        report = dataprep.write(
            encode,
            items,
            out,
            source=pipeline,
            components=components or encoders_of(pipeline),
            devices=devices.split(",") if "," in devices else devices,
            key=lambda picture: str(Path(picture.path).relative_to(pictures)),
            errors="pass",
            facts=facts,
            **options,
        )
    except shmload.ShmloadError as exc:
        sys.exit(f"encode_dataset: {exc}")
    sys.exit(report_on(report))


if __name__ == "__main__":
    main()
