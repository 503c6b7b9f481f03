#!/usr/bin/env python3
"""Encode pictures and captions into latents and embeddings: `encode_dataset.py PIPELINE IN OUT`.

IN is a folder of pictures. Each is turned as its camera says, cropped to its middle, and encoded
with the pipeline's VAE; its caption with the text encoders. A caption is the text file beside the
picture, or comes from `--captions`: COCO's JSON, or .jsonl or .csv with the columns `file_name` and
`text`. OUT gets shards and an index; docs/dataprep.md says what is in them.

After a kill, run it again: it goes on where it was. Exit code 0: every picture has a result. 3: all
are done, but some failed; OUT/index.jsonl says which and why. 1: the job failed. 130: Ctrl-C.
"""

import argparse
import csv
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import shmload
from shmload.integrations import dataprep

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}


def encode(pipe: Any, item: tuple[str, int, str]) -> dict[str, Any]:
    """Return the arrays of one picture; runs in the processes of the job.

    Args:
        pipe: a pipeline with a VAE, with text encoders, or with both.
        item: path and size of the picture, and its caption.

    Returns:
        `latents` of shape (channels, height, width), not scaled; and `text.0`, `text.1`, ...: what
        the pipeline's `encode_prompt` returns, in its order, without the batch axis.
    """
    path, size, caption = item
    arrays = {}
    if pipe.vae is not None:
        pixels = pipe.image_processor.preprocess(picture(path, size))
        if pixels.shape[-1] != size:
            raise ValueError(f"the pipeline takes {pixels.shape[-1]} pixels, not {size}")
        pixels = pixels.to(pipe.vae.device, pipe.vae.dtype)
        arrays["latents"] = pipe.vae.encode(pixels).latent_dist.sample()[0]
    if getattr(pipe, "text_encoder", None) is not None:
        wanted = dict.fromkeys(("prompt", "prompt_2", "prompt_3", "prompt_4"), caption)
        wanted |= {"device": pipe.text_encoder.device, "num_images_per_prompt": 1}
        wanted |= {"do_classifier_free_guidance": False}
        known = inspect.signature(pipe.encode_prompt).parameters
        found = pipe.encode_prompt(**{name: wanted[name] for name in wanted if name in known})
        for number, part in enumerate(part for part in found if part is not None):
            arrays[f"text.{number}"] = part[0] if len(part) == 1 else part
    return arrays


def picture(path: str, size: int) -> Any:
    """Return the middle of a picture as a square in RGB."""
    from PIL import Image, ImageOps

    if not Path(path).is_file():  # a FIFO would be waited for
        raise ValueError("it is no regular file")
    with Image.open(path) as file:
        return ImageOps.fit(ImageOps.exif_transpose(file).convert("RGB"), (size, size))


def find_pictures(folder: Path) -> list[str]:
    """Return the paths of all pictures below a folder, in the same order each time."""
    found = [path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES]
    return sorted(str(path.relative_to(folder)) for path in found)


def read_captions(file: Path) -> dict[str, str]:
    """Return captions by the picture's name; of several, the first.

    Args:
        file: COCO's JSON, with `images` and `annotations`; .jsonl or .csv with a row for each
            picture, with `file_name` and `text`.
    """
    with file.open(encoding="utf-8-sig", newline="") as lines:
        match file.suffix.lower():
            case ".json":
                coco = json.load(lines)
                names = {image["id"]: image["file_name"] for image in coco["images"]}
                rows = [(names[row["image_id"]], row["caption"]) for row in coco["annotations"]]
            case ".jsonl":
                parsed = [json.loads(line) for line in lines if line.strip()]
                rows = [(row["file_name"], row["text"]) for row in parsed]
            case ".csv":
                table = csv.DictReader(lines, strict=True)
                rows = [(row["file_name"], row["text"]) for row in table]
            case _:
                raise ValueError("captions come as .json (COCO), .jsonl or .csv")
    captions: dict[str, str] = {}
    for name, text in rows:
        captions.setdefault(name, text.strip())
    return captions


def caption_beside(path: Path) -> str:
    """Return the text beside a picture; empty if there is none."""
    text = path.with_suffix(".txt")
    return text.read_text("utf-8-sig").strip() if text.is_file() else ""


def encoders_of(pipeline: str) -> list[str]:
    """Return the names of a pipeline's VAE and text encoders."""
    path = Path(pipeline, "model_index.json")
    if not Path(pipeline).is_dir():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(pipeline, path.name))
    names = [
        name for name, entry in json.loads(path.read_text()).items() if isinstance(entry, list)
    ]
    return [name for name in names if name == "vae" or name.startswith("text_encoder")]


def main() -> int:
    """Run the job, and return the exit code."""
    parser = argparse.ArgumentParser(description="Encode pictures and captions.")
    parser.add_argument("pipeline", help="a directory or hub id")
    parser.add_argument("pictures", type=Path, help="a folder")
    parser.add_argument("out", type=Path, help="a folder for the results")
    parser.add_argument("--captions", type=Path, help=".json (COCO), .jsonl or .csv")
    parser.add_argument("--component", action="append", help="only this model; repeatable")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--size", type=int, default=512, help="width and height, in pixels")
    parser.add_argument("--limit", type=int, help="only the first pictures, for a trial")
    parser.add_argument("--procs", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for all GPUs in turn")
    parser.add_argument("--format", default="safetensors")
    parser.add_argument("--shard-items", type=int, default=256)
    parser.add_argument("--retry", action="store_true", help="try failed pictures again")
    given = parser.parse_args()

    names = find_pictures(given.pictures)[: given.limit]
    if not names:
        parser.error(f"there is no picture in {given.pictures}")
    captions: dict[str, str] | None = None
    if given.captions:
        captions = read_captions(given.captions)
        known = sum(name in captions for name in names)
        print(f"{known} of {len(names)} pictures have a caption", file=sys.stderr)
        if not known:
            parser.error(f"{given.captions} names none of them; it has {next(iter(captions), '')}")
    items = [
        (
            str(given.pictures / name),
            given.size,
            caption_beside(given.pictures / name) if captions is None else captions.get(name, ""),
        )
        for name in names
    ]
    components = given.component or encoders_of(given.pipeline)
    try:
        with dataprep.Job(
            given.pipeline,
            components=components,
            dtype=given.dtype,
            procs=given.procs,
            device=given.device,
        ) as job:
            report = job.write(
                encode,
                items,
                given.out,
                key=lambda item: str(Path(item[0]).relative_to(given.pictures)),
                format=given.format,
                shard_items=given.shard_items,
                retry=given.retry,
                facts={"size": str(given.size)},
            )
    except shmload.ShmloadError as error:
        print(f"encode_dataset: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("encode_dataset: interrupted; run it again, it goes on", file=sys.stderr)
        return 130
    print(f"{given.out}: {report.items} pictures, {report.computed} now, {report.failed} failed")
    return 3 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
