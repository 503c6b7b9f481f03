"""The demonstration: one pipeline, loaded three ways, compared.

    scripts/demo [OUTPUT]

OUTPUT is the directory that gets `image.png`.

Each way runs in its own process, so that times and memory are those of a fresh start.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shmload
from shmload._wording import format_nbytes
from shmload.errors import WorkerError

_CHILD_TIMEOUT_S = 600.0
_WAYS = {
    "diffusers": "diffusers' from_pretrained",
    "first": "shmload, nothing resident",
    "attach": "shmload, resident",
}


def run_demo(output: str = "demo-output") -> None:
    """Make a checkpoint, load it three ways, print the comparison and write an image.

    Args:
        output: the directory that gets `image.png`; made if it is missing.

    Raises:
        WorkerError: one of the ways failed.
    """
    target = Path(output)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shmload-demo-") as folder:
        print("making a class-conditional DiT pipeline with random float32 weights ...")
        source = _make_checkpoint(Path(folder) / "dit")
        try:
            results = {}
            for way, title in _WAYS.items():
                print(f"loading in a new process: {title} ...")
                results[way] = _run_child(way, source, target)
        finally:
            resident = [info.name for info in shmload.segments() if info.source.startswith(folder)]
            if resident:
                shmload.evict(*resident)
    _print_results(results)
    print(f"image: {target / 'image.png'} (noise: the weights are random)")


def _make_checkpoint(folder: Path) -> Path:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(0)
    pipe = DiTPipeline(
        transformer=DiTTransformer2DModel(
            num_attention_heads=16,
            attention_head_dim=72,
            num_layers=6,
            out_channels=8,
            sample_size=16,
        ),
        vae=AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 3,
            up_block_types=["UpDecoderBlock2D"] * 3,
            block_out_channels=[64, 128, 256],
        ),
        scheduler=DDIMScheduler(),
    )
    pipe.save_pretrained(folder)
    return folder


def _run_child(way: str, source: Path, target: Path) -> dict[str, Any]:
    started = str(time.monotonic())  # one clock for all processes
    command = [sys.executable, "-P", __file__, way, str(source), str(target), started]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    if done.returncode:
        error = WorkerError(f"the demonstration's process for {_WAYS[way]!r} failed")
        error.add_note(done.stderr[-4000:])
        raise error
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _print_results(results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':28}{'started':>9}{'again':>11}{'private memory':>16}")
    for way, title in _WAYS.items():
        result = results[way]
        print(
            f"{title:28}{result['process_s']:8.2f}s{result['call_s']:10.2f}s"
            f"{format_nbytes(result['private_nbytes']):>16}"
        )
    if len({result["digest"] for result in results.values()}) != 1:
        raise WorkerError("the three ways gave different weights; please report this")
    print("\nall weights equal, byte for byte: yes")
    same_image = len({result["image"] for result in results.values()}) == 1
    print(f"all images equal: {'yes' if same_image else 'up to rounding'}")


def _child(way: str, source: str, target: str, started: str) -> None:
    """Load the pipeline twice in one way, and print times, memory and digests as JSON."""
    load = _load_with_diffusers if way == "diffusers" else _load_with_shmload
    pipe = load(source)
    process_s = time.monotonic() - float(started)
    before = _private_nbytes()
    called = time.monotonic()
    again = load(source)
    call_s = time.monotonic() - called
    private_nbytes = _private_nbytes() - before
    image = _generate(again)
    if way == "attach":
        image.save(Path(target) / "image.png")
    print(
        json.dumps(
            {
                "process_s": process_s,
                "call_s": call_s,
                "private_nbytes": max(0, private_nbytes),
                "digest": _digest(pipe),
                "image": hashlib.blake2b(image.tobytes()).hexdigest(),
            }
        )
    )


def _load_with_diffusers(source: str) -> Any:
    import torch
    from diffusers import DiTPipeline

    return DiTPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)


def _load_with_shmload(source: str) -> Any:
    return shmload.load_pipeline(source, dtype="bfloat16", keep=True)


def _digest(pipe: Any) -> str:
    import torch

    digest = hashlib.blake2b()
    for model in (pipe.transformer, pipe.vae):
        for tensor in model.state_dict().values():
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _generate(pipe: Any) -> Any:
    import torch

    result = pipe(
        class_labels=[207],
        num_inference_steps=4,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    return result.images[0]


def _private_nbytes() -> int:
    """Return the memory that only this process has, in bytes.

    Not Private_Dirty, which counts pages of shared memory that only one process maps at the moment.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = (line.split() for line in lines if line.startswith("Anonymous:"))
    return sum(int(fields[1]) for fields in private) * 1024


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _child(*sys.argv[1:])
    else:
        run_demo(*sys.argv[1:])
