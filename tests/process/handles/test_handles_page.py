"""The examples of handles run as docs/share.md prints them, and so do joblib and datasets."""

import re
from pathlib import Path

import pytest
from forking_python import FINALIZES

_PAGE = Path(__file__).parents[3] / "docs" / "share.md"
_SOURCE = "path/to/stable-diffusion"
# What the page says of them in a sentence.
_DATASETS = """
import datasets
import torch
import shmload

handle = shmload.share("path/to/stable-diffusion", dtype="bfloat16", components=["text_encoder"])

def embed(row):
    pipe = handle.load()
    tokens = pipe.tokenizer(
        row["caption"], padding="max_length", truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        return {"embedding": pipe.text_encoder(tokens.input_ids).pooler_output[0].float().numpy()}

captions = datasets.Dataset.from_dict({"caption": ["a cat", "the red dog", "a boat", "fog"]})
print(captions.map(embed, num_proc=2))
"""
_JOBLIB = """
import torch
from joblib import Parallel, delayed
import shmload

def encode(handle, seed):
    vae = handle.load().vae
    image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return vae.encode(image.to(vae.dtype)).latent_dist.mode().float().numpy()

with shmload.share("path/to/stable-diffusion", dtype="bfloat16", components=["vae"]) as handle:
    print(len(Parallel(n_jobs=2)(delayed(encode)(handle, seed) for seed in range(8))))
"""
# Output of each example: first those of the page, in its order.
_PRINTS = {
    "share": r"torch.bfloat16 \d+ bytes as text\n",
    "DataLoader": r"(torch.Size\(\[4, 4, 32, 32\]\)\n){2}",
    "multiprocessing": r"8\n",
    "subprocess": r"torch.bfloat16\n",
    "datasets": r"Dataset\({\n +features: \['caption', 'embedding'\],\n +num_rows: 4\n}\)\n",
    "joblib": r"8\n",
}


def examples():
    blocks = re.findall(r"^```python\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    return [*(each for each in blocks if "shmload.share(" in each), _DATASETS, _JOBLIB]


def test_each_example_is_run_below():
    assert len(examples()) == len(_PRINTS)
    assert all(_SOURCE in example for example in examples())


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(_PRINTS)), ids=_PRINTS)
def test_example_runs(saved, tmp_path, monkeypatch, warm_python, shm_names, place):
    monkeypatch.setenv(FINALIZES, "1")
    path = tmp_path / "example.py"
    path.write_text(examples()[place].replace(_SOURCE, str(saved("stable-diffusion"))))
    ended = warm_python.run(path)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(list(_PRINTS.values())[place], ended.stdout)
    assert shm_names() == []
