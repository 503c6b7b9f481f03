"""The demonstration: one pipeline, loaded four ways, compared; and a checkpoint to go on with.

    scripts/demo [OUTPUT]

OUTPUT is the directory that gets a checkpoint of 120 MB, and a program that loads it.

Each way runs in its own process, so that times and memory are those of a fresh start.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shmload
from shmload._host.procfs import rollup_nbytes
from shmload._wording import format_nbytes
from shmload.errors import WorkerError

_CHILD_TIMEOUT_S = 600.0
_PYTHON = (sys.executable, "-P")
_SHMLOAD = (sys.executable, "-P", "-m", "shmload")
_RUN = (*_SHMLOAD, "run")
_WAYS = {
    "diffusers": "diffusers' from_pretrained",
    "first": "shmload, nothing resident",
    "attach": "shmload, resident",
    "run": "shmload run, resident",
}

_APP = """\
import shmload

pipe = shmload.load_pipeline({source!r}, dtype="bfloat16", keep=True)
image = pipe("a lighthouse in the fog", num_inference_steps=4).images[0]
image.save({image!r})
"""


def run_demo(output: str = "demo-output") -> None:
    """Make a checkpoint, load it four ways, print the comparison and what to try next.

    Args:
        output: the directory that gets the files; made if it is missing.

    Raises:
        WorkerError: one of the ways failed.
    """
    target = Path(output).resolve()
    target.mkdir(parents=True, exist_ok=True)
    source, app = target / "stable-diffusion", target / "app.py"
    if not (source / "model_index.json").exists():
        print("making a small Stable Diffusion with random float32 weights ...", flush=True)
        _checked([*_PYTHON, __file__, "make", str(source)], "making the checkpoint")
    app.write_text(_APP.format(source=str(source), image=str(target / "image.png")))
    _free(source)  # of an earlier demonstration
    place = tempfile.mkdtemp(prefix="shmload-demo-")  # the user's own templates go on
    os.environ["XDG_RUNTIME_DIR"] = place
    try:
        results = {way: _load_in(way, source) for way in _WAYS}
    finally:
        subprocess.run([*_SHMLOAD, "template", "stop"], capture_output=True, check=False)
        shutil.rmtree(place)
        _free(source)
    _print_results(results)
    _print_what_is_next(target, results)


def _free(source: Path) -> None:
    resident = [info.name for info in shmload.segments() if info.source.startswith(f"{source}/")]
    if resident:
        shmload.evict(*resident)


def _make_checkpoint(folder: Path) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
    from diffusers import UNet2DConditionModel as UNet
    from tokenizers_tiny import clip_tokenizer
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    tokenizer = clip_tokenizer()
    # Most weights are in the table of tokens, so that an image takes little time on any CPU.
    text = CLIPTextConfig(vocab_size=49408, hidden_size=512, intermediate_size=1024)
    text.num_hidden_layers, text.num_attention_heads = 2, 8
    text.bos_token_id, text.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    pipe = StableDiffusionPipeline(
        vae=AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[32, 32, 32, 32],
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=tokenizer,
        unet=UNet(
            sample_size=8,
            down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
            block_out_channels=[32, 64],
            cross_attention_dim=512,
        ),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder)


def _load_in(way: str, source: Path) -> dict[str, Any]:
    if way == "run":
        print("starting a process that imports the libraries, for `shmload run` ...", flush=True)
        _checked([*_SHMLOAD, "template", "warm"], "shmload template warm")
    print(f"loading in a new process: {_WAYS[way]} ...", flush=True)
    prefix = _RUN if way == "run" else _PYTHON
    started = str(time.monotonic())  # one clock for all processes
    done = _checked([*prefix, __file__, way, str(source), started], _WAYS[way])
    result: dict[str, Any] = json.loads(done.splitlines()[-1])
    return result


def _checked(command: list[str], title: str) -> str:
    """Run a command and return its stdout.

    Raises:
        WorkerError: it failed; a note has the end of its stderr.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
    )
    if done.returncode:
        error = WorkerError(f"the demonstration's process for {title!r} failed")
        error.add_note(done.stderr[-4000:])
        raise error
    return done.stdout


def _print_results(results: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':28}{'started':>9}{'again':>11}{'private memory':>16}")
    for way, title in _WAYS.items():
        result = results[way]
        print(
            f"{title:28}{result['process_s']:8.2f}s{result['call_s']:10.2f}s"
            f"{format_nbytes(result['private_nbytes']):>16}"
        )
    if len({result["digest"] for result in results.values()}) != 1:
        raise WorkerError("the four ways gave different weights; please report this")
    print("\nall weights equal, byte for byte: yes")


def _print_what_is_next(target: Path, results: dict[str, dict[str, Any]]) -> None:
    root = os.path.relpath(target)
    python, run = results["attach"]["process_s"], results["run"]["process_s"]
    print(f"""
{root}/ has the checkpoint, and app.py, which loads it and writes image.png (noise: the
weights are random). Try next:

  source {os.path.relpath(sys.prefix)}/bin/activate
  python {root}/app.py         # twice; the second has its pipeline after some {python:.1f} s
  shmload run {root}/app.py    # three times; the third has it after some {run:.1f} s
  shmload rm {root}/stable-diffusion    # frees the weights""")


def _child(way: str, source: str, started: str) -> None:
    """Load the pipeline twice in one way, and print times, memory and digests as JSON."""
    load = _load_with_diffusers if way == "diffusers" else _load_with_shmload
    pipe = load(source)
    process_s = time.monotonic() - float(started)
    before = rollup_nbytes(os.getpid(), "Anonymous:")  # Private_Dirty has pages of segments too
    called = time.monotonic()
    again = load(source)
    call_s = time.monotonic() - called
    private_nbytes = rollup_nbytes(os.getpid(), "Anonymous:") - before
    print(
        json.dumps(
            {
                "process_s": process_s,
                "call_s": call_s,
                "private_nbytes": max(0, private_nbytes),
                "digest": _digest(pipe, again),
            }
        )
    )


def _load_with_diffusers(source: str) -> Any:
    import torch
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)


def _load_with_shmload(source: str) -> Any:
    return shmload.load_pipeline(source, dtype="bfloat16", keep=True)


def _digest(*pipes: Any) -> str:
    import torch

    digest = hashlib.blake2b()
    for pipe in pipes:
        for model in (pipe.unet, pipe.vae, pipe.text_encoder):
            for tensor in model.state_dict().values():
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "make":
        _make_checkpoint(Path(sys.argv[2]))
    elif len(sys.argv) > 2:
        _child(*sys.argv[1:])
    else:
        run_demo(*sys.argv[1:])
