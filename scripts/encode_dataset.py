#!/usr/bin/env python3
"""Encode pictures and captions into latents and embeddings: `encode_dataset.py PIPELINE IN OUT`.

The script crops each picture in the folder IN and encodes it with the pipeline's VAE. The text file
of the same name is the picture's caption, which the text encoders encode. OUT gets safetensors
shards and an index, described in docs/dataprep.md. After a kill, run it again: it continues where
it stopped.

Exit code 0: all pictures are encoded. 1: the job failed, or some pictures did; the index lists
them, and the next run tries them again. 2: wrong usage.
"""

import inspect
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click

import shmload
from shmload.integrations import dataprep

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


class Picture(NamedTuple):
    """One item of the job; its caption is in the text file beside the picture."""

    path: str
    size: int


def encode(pipe: Any, picture: Picture) -> dict[str, Any]:
    """Return unscaled latents of shape (channels, height, width), and text embeddings.

    `text.0`, `text.1`, ... are the values that the pipeline's `encode_prompt` returns, in its
    order, without the batch axis.
    """
    from PIL import Image, ImageOps

    with Image.open(picture.path) as image:
        square = ImageOps.fit(image.convert("RGB"), (picture.size, picture.size))
    pixels = pipe.image_processor.preprocess(square).to(pipe.vae.device, pipe.vae.dtype)
    arrays = {"latents": pipe.vae.encode(pixels).latent_dist.sample()[0]}
    text = Path(picture.path).with_suffix(".txt")
    caption = text.read_text("utf-8").strip() if text.exists() else ""
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


def find_pictures(folder: Path, size: int) -> list[Picture]:
    """Return the pictures below a folder, sorted by path."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
    return [Picture(str(path), size) for path in paths]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("pipeline")
@click.argument("pictures", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--procs", default=4, show_default=True, type=click.IntRange(min=0))
@click.option("--dtype", default="bfloat16", show_default=True, help="Dtype of the models.")
@click.option(
    "--size", default=512, show_default=True, help="Width and height of a picture, in pixels."
)
@click.option(
    "--component",
    "components",
    multiple=True,
    default=("vae", "text_encoder"),
    show_default=True,
    help="Model to load; repeatable.",
)
@click.option(
    "--devices",
    default="cpu",
    show_default=True,
    help="cpu, a list such as cuda:0,cuda:1, or round-robin for all GPUs.",
)
@click.option("--threads", default=1, show_default=True, help="Threads of each process.")
@click.option("--shard-items", default=1000, show_default=True, help="Pictures in each shard.")
def main(
    pipeline: str,
    pictures: Path,
    out: Path,
    procs: int,
    dtype: str,
    size: int,
    components: tuple[str, ...],
    devices: str,
    threads: int,
    shard_items: int,
) -> None:
    """Encode the PICTURES of a folder with a PIPELINE (directory or hub id) into the folder OUT."""
    try:
        report = dataprep.write(
            encode,
            find_pictures(pictures, size),
            out,
            source=pipeline,
            components=components,
            dtype=dtype,
            procs=procs,
            devices=devices.split(",") if "," in devices else devices,
            threads=threads,
            key=lambda picture: str(Path(picture.path).relative_to(pictures)),
            shard_items=shard_items,
            errors="pass",
            facts={"size": str(size)},
        )
    except shmload.ShmloadError as exc:
        sys.exit(f"encode_dataset: {exc}")
    click.echo(
        f"{report.folder}: {report.items} pictures, {report.added} of them in this run, "
        f"{report.failed} failed, {report.nbytes / 1e6:.1f} MB in {report.shards} shards"
    )
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
