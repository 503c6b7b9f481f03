"""`scripts/bench gpu` makes its pipelines and looks for a GPU before it measures."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.checkpoints import FLUX_SMALL, make_flux
from diffusers import DiffusionPipeline

_BENCH = Path(__file__).parents[3] / "scripts" / "bench"
_ABSENT = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def weights(directory, **kwargs):
    pipe = DiffusionPipeline.from_pretrained(directory, **dict.fromkeys(_ABSENT), **kwargs)
    return pipe.transformer.state_dict()


def test_pipelines_load_and_differ_only_in_dtype(tmp_path):
    make_flux(tmp_path / "bf16", FLUX_SMALL, "bfloat16")
    make_flux(tmp_path / "fp32", FLUX_SMALL, "float32", shard_nbytes=100_000)
    index = tmp_path / "fp32/transformer/diffusion_pytorch_model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values())
    assert len(names) > 2
    assert all((index.parent / name).stat().st_size < 110_000 for name in names)
    found = weights(tmp_path / "bf16", torch_dtype=torch.bfloat16)
    wanted = weights(tmp_path / "fp32")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.bfloat16())
        assert tensor.numel() < 16 or 0.01 < tensor.std() < 0.03


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_one_sentence(tmp_path, warm_python, monkeypatch):
    monkeypatch.delenv("BENCH_DEVICE", raising=False)
    run = warm_python.run(_BENCH, "gpu", "--work", tmp_path)
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line == "Error: the suite `gpu` needs a CUDA device, and torch finds none here"
