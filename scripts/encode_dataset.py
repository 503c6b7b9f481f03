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
run. 130: it was interrupted.
"""

import inspect
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from caption_table import captions_for, read_captions

import shmload
from shmload._results.names import FORMATS
from shmload.integrations import dataprep
from shmload.integrations.results import Results, ResultsReport, continued_order

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
_CAPTION_SUFFIX = ".txt"
# Those of diffusers that encode one picture, and give a distribution.
_VAES = (
    "AutoencoderKL",
    "AsymmetricAutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanImage",
)
_SOME_FAILED = 3
_INTERRUPTED = 130
_SHOWN_FAILURES = 10


class Picture(NamedTuple):
    """One item of the job."""

    path: str
    size: int
    caption: str | None
    """None: it is in the text file beside the picture, if there is one."""
    is_gone: bool = False
    """It is not in the folder any more; an earlier run began it, and has no result."""


def encode(pipe: Any, picture: Picture) -> dict[str, Any]:
    """Return unscaled latents of shape (channels, height, width), and text embeddings.

    `text.0`, `text.1`, ... are the values that the pipeline's `encode_prompt` returns, in its
    order, without the batch axis. Without a text encoder there are none, and no latents without a
    VAE.
    """
    if picture.is_gone:
        raise FileNotFoundError(f"{picture.path} was removed before it was encoded")
    arrays = {}
    if pipe.vae is not None:
        pixels = pipe.image_processor.preprocess(square_of(picture))
        if (width := pixels.shape[-1]) != picture.size:
            raise ValueError(
                f"the pipeline takes {width} pixels, not {picture.size}; give --size {width}"
            )
        pixels = pixels.to(pipe.vae.device, pipe.vae.dtype)
        arrays["latents"] = pipe.vae.encode(pixels).latent_dist.sample()[0]
    if getattr(pipe, "text_encoder", None) is None:
        return arrays
    caption = caption_of(picture)
    known = inspect.signature(pipe.encode_prompt).parameters
    wanted = {
        "prompt": caption,
        "prompt_2": caption,
        "prompt_3": caption,
        "prompt_4": caption,
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

    require_file(picture.path)
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
    if not text.exists():
        return ""
    require_file(text)
    try:
        return text.read_text("utf-8-sig").strip()
    except UnicodeDecodeError as exc:
        raise ValueError(f"{text} is not UTF-8: {exc}") from exc


def require_file(path: str | Path) -> None:
    """Raise an error if a path is no regular file: opening a FIFO would wait for its writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is no regular file")


class Found(NamedTuple):
    """What a folder of pictures has."""

    names: list[str]
    """Paths of the pictures below the folder, in order."""
    without_text: list[str]
    """Those that have no text file beside them."""
    skipped: str
    """Which files and folders are no pictures; empty if none."""


def find_pictures(folder: Path) -> Found:
    """Return the pictures below a folder."""
    found, texts, others, links = [], set[Path](), Counter[str](), 0
    for where, folders, files in os.walk(folder):
        links += sum(os.path.islink(os.path.join(where, name)) for name in folders)
        for path in (Path(where, name).relative_to(folder) for name in files):
            if path.suffix.lower() in _SUFFIXES:
                found.append(path)
            elif path.suffix == _CAPTION_SUFFIX:
                texts.add(path)
            else:
                others[path.suffix or "no suffix"] += 1
    skipped = []
    if others:
        skipped.append(f"{_counted(others.total(), 'file')} ({', '.join(sorted(others))})")
    if links:
        skipped.append(f"{_counted(links, 'folder')} behind a symbolic link")
    words = ", ".join(skipped)
    if not found:
        more = f"; skipped: {words}" if words else ""
        raise click.UsageError(f"there is no picture in {folder} ({', '.join(_SUFFIXES)}){more}")
    found.sort()
    names = [str(path) for path in found]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as exc:
            raw = os.fsencode(name)
            raise click.UsageError(f"the name {raw!r} in {folder} is not UTF-8; rename it") from exc
    without = [str(path) for path in found if path.with_suffix(_CAPTION_SUFFIX) not in texts]
    return Found(names, without, words)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def models_of(pipeline: str) -> dict[str, tuple[str, str]]:
    """Return library and class of each model by name; none if the index cannot be read."""
    try:
        listed = read_json(pipeline, "model_index.json")
        pairs = {name: entry for name, entry in listed.items() if isinstance(entry, list)}
        return {name: (library, kind) for name, (library, kind) in pairs.items() if library}
    except Exception:  # shmload says what is wrong with the source
        return {}


def read_json(pipeline: str, name: str) -> Any:
    """Return the content of a JSON file of a pipeline."""
    path = Path(pipeline, name)
    if not Path(pipeline).is_dir():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(pipeline, name))
    return json.loads(path.read_text("utf-8"))


def choose_components(pipeline: str, given: Sequence[str], size: int) -> Sequence[str]:
    """Return the components to load, after a check of what can be known before.

    Args:
        pipeline: directory or hub id.
        given: the components that were asked for; none for the VAE and all text encoders.
        size: of the pictures.
    """
    models = models_of(pipeline)
    found = [name for name in models if name == "vae" or name.startswith("text_encoder")]
    chosen = given or found or ["vae"]
    if not {"vae", "text_encoder"}.intersection(chosen):
        raise click.UsageError("give --component vae, --component text_encoder, or both")
    encoders = [name for name in found if name != "vae"] or ["text_encoder"]
    alone = "for captions alone give " + " ".join(f"--component {name}" for name in encoders)
    if models and "vae" in chosen:
        library, kind = models.get("vae", ("", "none"))
        if library in ("", "diffusers") and kind not in _VAES:
            raise click.UsageError(
                f"the VAE of {pipeline} is {kind}. This script needs an image pipeline, with "
                f"{' or '.join(_VAES)}; {alone}"
            )
        check_size(pipeline, size)
    elif models and not given:
        raise click.UsageError(f"{pipeline} has no VAE; {alone}")
    return chosen


def check_size(pipeline: str, size: int) -> None:
    """Raise an error if the pipeline would round the size, as far as the VAE's files tell."""
    try:
        multiple = 2 ** (len(read_json(pipeline, "vae/config.json")["block_out_channels"]) - 1)
    except Exception:  # shmload says what is wrong with the source; `encode` checks the size too
        return
    if size % multiple:
        fitting = [n for n in (size - size % multiple, size - size % multiple + multiple) if n]
        raise click.UsageError(
            f"--size {size} is no multiple of {multiple}, as the pipeline needs it; give "
            f"{' or '.join(map(str, fitting))}"
        )


def report_on(report: ResultsReport) -> int:
    """Say what is in the folder and which pictures failed; return the exit code."""
    click.echo(
        f"{report.folder}: {report.items} pictures, {report.added} of them in this run, "
        f"{report.failed} failed, {report.nbytes / 1e6:.1f} MB in {report.shards} shards"
    )
    if report.failed_before:
        failed = Results(report.folder).errors
        click.echo(f"{report.failed_before} failed in an earlier run; try again: --retry-failed")
        click.echo("failed, in this run or earlier:")
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
    type=click.Choice([*FORMATS]),
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
    chosen = choose_components(pipeline, components, size)
    found, without_text, skipped = find_pictures(pictures)
    if skipped:
        click.echo(f"skipped: {skipped}", err=True)
    names = found[:limit]
    facts = {"size": str(size)}
    texts: Mapping[str, str] | None = None
    if captions:
        # Of all pictures: the folder OUT may have more of them already than the limit allows.
        texts = captions_for(found, read_captions(captions, file_column, caption_column), captions)
        facts["captions"] = caption_column
    elif without_text and chosen and "text_encoder" in chosen:
        click.echo(
            f"there is no text file beside {pictures / without_text[0]}; without a caption: "
            f"{len(without_text)} of {len(found)}",
            err=True,
        )
    try:
        names = continued_order(out, names)
        gone = set(names).difference(found)
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            click.echo(f"not in {pictures} any more: {min(gone)}{more}; results stay", err=True)
        items = [
            Picture(
                str(pictures / name),
                size,
                None if texts is None else texts.get(name, ""),
                is_gone=name in gone,
            )
            for name in names
        ]
        report = dataprep.write(
            encode,
            items,
            out,
            source=pipeline,
            components=chosen,
            devices=devices.split(",") if "," in devices else devices,
            key=lambda picture: str(Path(picture.path).relative_to(pictures)),
            errors="pass",
            facts=facts,
            **options,
        )
    except shmload.ShmloadError as exc:
        sys.exit(f"encode_dataset: {exc}")
    except KeyboardInterrupt:
        click.echo("encode_dataset: interrupted; run it again, it goes on where it was", err=True)
        sys.exit(_INTERRUPTED)
    sys.exit(report_on(report))


if __name__ == "__main__":
    main()
