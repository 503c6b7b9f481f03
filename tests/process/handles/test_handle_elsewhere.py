"""A handle crosses to processes of any kind and gives the same weights there."""

import hashlib
import json
import pickle

import pytest
import torch
from comparing import as_bytes, reference
from forking_python import FINALIZES

import shmload

# A user's program: in each process of a pool, a digest of the weights and what they compute.
PROGRAM = """
import hashlib, json, multiprocessing, sys
import torch
import shmload

def attach(handle):
    handle.load()

def look(handle):
    vae = handle.load().vae
    with torch.no_grad():
        latents = vae.encode(torch.ones(1, 3, 16, 16, dtype=vae.dtype)).latent_dist.mode()
    digest = hashlib.sha256()
    for tensor in vae.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest(), latents.float().tolist(), len(shmload.segments())

if __name__ == "__main__":
    source, method = sys.argv[1:]
    context = multiprocessing.get_context(method)
    with (
        shmload.share(source, dtype="bfloat16", components=["vae"]) as handle,
        context.Pool(1, attach, (handle,)) as pool,
    ):
        print(json.dumps(pool.map(look, [handle] * 4)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_a_pool_attach(saved, tmp_path, warm_python, monkeypatch, shm_names, method):
    monkeypatch.setenv(FINALIZES, "1")
    source, path = saved("stable-diffusion"), tmp_path / "program.py"
    path.write_text(PROGRAM)
    ended = warm_python.run(path, source, method)
    assert ended.returncode == 0, ended.stderr
    vae = reference(str(source), torch.bfloat16).vae
    digest = hashlib.sha256(b"".join(map(as_bytes, vae.state_dict().values()))).hexdigest()
    with torch.no_grad():
        latents = vae.encode(torch.ones(1, 3, 16, 16, dtype=torch.bfloat16)).latent_dist.mode()
    for found, computed, segments in json.loads(ended.stdout):
        assert (found, segments) == (digest, 1)
        assert torch.allclose(torch.tensor(computed), latents.float(), rtol=0.05, atol=0.05)
    assert shm_names() == []


def test_equal_handles_have_one_text_and_one_pickle(saved):
    """By these datasets finds again what it has computed."""
    source, dtype = saved("stable-diffusion"), {"vae": "bfloat16", "default": "float16"}
    handle = shmload.Handle.of(source, dtype=dtype, components=["vae", "text_encoder"])
    turned = dict(reversed(dtype.items()))
    same = shmload.Handle.of(source, dtype=turned, components={"text_encoder", "vae"})
    for other in (same, pickle.loads(pickle.dumps(handle)), shmload.Handle.from_text(handle.text)):
        assert other == handle
        assert pickle.dumps(other) == pickle.dumps(handle)
    one = shmload.Handle.of(source, dtype=dtype, components=["vae"])
    assert pickle.dumps(one) != pickle.dumps(handle)
