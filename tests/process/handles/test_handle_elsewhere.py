"""A handle crosses to processes of any kind and gives the same weights there."""

import hashlib
import json
import os
import pickle

import pytest
import torch
from comparing import as_bytes, reference
from forking_python import FINALIZES

import shmload

# A user's program: the work of the other processes, and the ways to start them.
PROGRAM = '''
import hashlib, json, multiprocessing, os, sys
import torch
import shmload

def attach(handle):
    handle.load()

def look(handle, number=0):
    """Return a digest of the weights, what they compute, and where."""
    vae = handle.load().vae
    with torch.no_grad():
        image = torch.full((1, 3, 16, 16), number / 8, dtype=vae.dtype)
        latents = vae.encode(image).latent_dist.mode()[0]
    digest = hashlib.sha256()
    for tensor in vae.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest(), latents, os.getpid()

class Looks(torch.utils.data.Dataset):
    def __init__(self, handle):
        self.handle = handle
    def __len__(self):
        return 8
    def __getitem__(self, number):
        digest, latents, pid = look(self.handle, number)
        return {"digest": digest, "latents": latents, "pid": pid}

def in_pool(handle, method):
    context = multiprocessing.get_context(method)
    with context.Pool(1, attach, (handle,)) as pool:
        return pool.starmap(look, [(handle, number) for number in range(8)], chunksize=2)

def in_executor(handle, method):
    from concurrent.futures import ProcessPoolExecutor
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, context, attach, (handle,)) as executor:
        return list(executor.map(look, [handle] * 8, range(8)))

def in_data_loader(handle, method):
    from torch.utils.data import DataLoader
    loader = DataLoader(Looks(handle), batch_size=2, num_workers=1, multiprocessing_context=method)
    return [
        found for batch in loader
        for found in zip(batch["digest"], batch["latents"], batch["pid"].tolist(), strict=True)
    ]

def in_daemon(handle, method):
    """As a job of a job: in a process that may have no children."""
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs, handle), daemon=True)
    process.start()
    found = ours.recv()
    ours.send("fetched")  # torch's tensors go by descriptors that their process has
    process.join()
    return found

def answer(channel, handle):
    channel.send([look(handle, number) for number in range(8)])
    channel.recv()

if __name__ == "__main__":
    source, way, method = sys.argv[1:]
    with shmload.share(source, torch_dtype="bfloat16", components=["vae"]) as handle:
        found = globals()[way](handle, method)
        print(json.dumps({
            "digests": sorted({digest for digest, _, _ in found}),
            "latents": [latents.float().tolist() for _, latents, _ in found],
            "pids": len({pid for _, _, pid in found} - {os.getpid()}),
            "segments": len(shmload.segments()),
        }))
'''


@pytest.fixture
def run(tmp_path, warm_python, monkeypatch):
    """Run a program from a file or a string; return its output."""
    monkeypatch.setenv(FINALIZES, "1")

    def start(program, *args, given="file"):
        path = tmp_path / "program.py"
        path.write_text(program)
        ended = warm_python.run(path if given == "file" else program, *args)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return start


def digest_of(vae):
    return hashlib.sha256(b"".join(map(as_bytes, vae.state_dict().values()))).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "method", "given"),
    [
        # Those of `spawn` and `forkserver` import the libraries, so there is one of each.
        ("in_executor", "fork", "-c"),
        ("in_pool", "forkserver", "file"),
        ("in_daemon", "fork", "file"),
        ("in_data_loader", "spawn", "file"),
    ],
)
def test_processes_of_libraries_attach(saved, run, shm_names, way, method, given):
    source = saved("stable-diffusion")
    found = json.loads(run(PROGRAM, source, way, method, given=given))
    wanted = reference(str(source), torch.bfloat16).vae
    assert found["digests"] == [digest_of(wanted)]
    assert found["pids"] in (1, 2)  # one fast process may do the work of both
    assert found["segments"] == 1
    assert len(found["latents"]) == 8
    with torch.no_grad():
        image = torch.full((1, 3, 16, 16), 7 / 8, dtype=torch.bfloat16)
        latents = wanted.encode(image).latent_dist.mode()[0].float()
    assert torch.allclose(torch.tensor(found["latents"][7]), latents, rtol=0.05, atol=0.05)
    assert shm_names() == []


# datasets -----------------------------------------------------------------------------------------

EMBED = """
import os, sys, time
import datasets, torch
import shmload
source, folder, log, *rest = sys.argv[1:]
handle = shmload.share(source, torch_dtype="bfloat16", components={"text_encoder", "vae"})
def embed(row):
    pipe = handle.load()
    with open(log, "a") as calls:
        calls.write(f"{os.getpid()}\\n")
    while len({*open(log)}) < 2:  # or one process might take both shares
        time.sleep(0.01)
    tokens = pipe.tokenizer(row["caption"], padding="max_length", return_tensors="pt")
    with torch.no_grad():
        return {"embedding": pipe.text_encoder(tokens.input_ids)[0].float().numpy()}
hashes = [datasets.fingerprint.Hasher.hash(each) for each in (handle, embed)]
if rest == ["hash"]:
    print(*hashes)
    sys.exit()
datasets.disable_progress_bars()
mapped = datasets.load_from_disk(folder).map(embed, num_proc=2)
embedding = mapped.with_format("numpy")["embedding"][:]
print(*hashes, mapped._fingerprint, *embedding.shape[:2])
"""


@pytest.mark.slow
def test_datasets_finds_what_it_has_mapped_again(copied, run, tmp_path, shm_names, monkeypatch):
    from datasets import Dataset  # not while all tests are collected

    source, folder, log = copied("stable-diffusion"), tmp_path / "captions", tmp_path / "log"
    captions = ["a cat", "the red dog", "a boat", "fog"]
    Dataset.from_dict({"caption": captions}).save_to_disk(folder)
    first = run(EMBED, source, folder, log)
    pids = log.read_text().split()
    assert len(pids) == 4
    assert len(set(pids)) == 2
    monkeypatch.setenv("PYTHONHASHSEED", "2")  # which starts a new Python
    assert run(EMBED, source, folder, log) == first
    assert log.read_text().split() == pids  # nothing was computed twice
    monkeypatch.delenv("PYTHONHASHSEED")
    os.utime(source / "vae" / "diffusion_pytorch_model.safetensors", ns=(1, 1))
    # What datasets finds again depends on these hashes alone.
    hashes = run(EMBED, source, folder, log, "hash").split()
    assert not set(hashes) & set(first.split())
    assert shm_names() == []


@pytest.mark.slow
def test_hash_of_a_handle_is_that_of_what_it_stands_for(saved):
    from datasets.fingerprint import Hasher

    source = saved("stable-diffusion")
    arguments = {"torch_dtype": {"vae": "bfloat16", "default": "float16"}}
    names = ["vae", "text_encoder"]
    with shmload.share(source, components=names, **arguments) as handle:
        hashed = Hasher.hash(handle)
        handle.load()
        others = [
            handle,
            pickle.loads(pickle.dumps(handle)),
            shmload.Handle.from_text(handle.text),
            shmload.Handle.of(source, components=set(names), **arguments),
        ]
        assert [Hasher.hash(other) for other in others] == [hashed] * 4
        one = shmload.Handle.of(source, components=["vae"], **arguments)
        assert Hasher.hash(one) != hashed
        assert Hasher.hash(lambda: one) != Hasher.hash(lambda: handle)
