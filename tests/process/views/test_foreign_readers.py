"""Programs that know nothing of shmload read a view directory, and map its segments."""

import hashlib
import json

import pytest
import torch
from comparing import as_bytes, reference
from mappings import state_of

import shmload

pytestmark = pytest.mark.libraries

# Begins each program: shmload cannot be imported. `summarise` says of some tensors where they lie
# and what they are.
_BEGIN = """
import bisect, hashlib, json, sys
assert not any(name.partition(".")[0] == "shmload" for name in sys.modules)
sys.modules["shmload"] = None
def summarise(tensors):
    lines = []
    for line in open("/proc/self/maps"):
        fields = line.split(None, 5)
        first, last = (int(each, 16) for each in fields[0].split("-"))
        lines.append((first, last, fields[5] if len(fields) > 5 else ""))
    found = {}
    for name, tensor in tensors.items():
        address = tensor.data_ptr()
        *_, path = lines[bisect.bisect(lines, (address, float("inf"))) - 1]
        content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[name] = [path.startswith("/dev/shm/shmload-"), str(tensor.dtype),
                       hashlib.sha256(content).hexdigest()]
    print(json.dumps(found))
"""


def wanted(tensors):
    """Return what `summarise` says of tensors that are mapped from segments."""
    return {
        name: [True, str(tensor.dtype), hashlib.sha256(as_bytes(tensor)).hexdigest()]
        for name, tensor in tensors.items()
    }


@pytest.fixture
def place(tmp_path, evicts):
    return tmp_path / "view"


@pytest.fixture
def read(warm_python, tmp_path, place):
    """Run a program that has the directory's path as its argument; return what it summarises."""

    def read(code):
        path = tmp_path / "program.py"
        path.write_text(_BEGIN + "import torch\n" + code)
        ended = warm_python.run(path, place)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return read


@pytest.mark.parametrize("family", ["stable-diffusion", "flux"])
def test_diffusers(saved, place, read, family):
    shmload.view_directory(saved(family, sharded=True), place, dtype="bfloat16")
    got = read("""
import diffusers
pipe = diffusers.DiffusionPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16)
summarise({f"{name}.{key}": tensor for name, part in pipe.components.items()
           if isinstance(part, torch.nn.Module) for key, tensor in part.state_dict().items()})
""")
    assert got == wanted(state_of(reference(saved(family), torch.bfloat16)))


@pytest.mark.parametrize("dtype", ["dtype='auto'", "dtype=torch.bfloat16"])
def test_transformers(saved, place, read, dtype):
    import transformers

    source = saved("stable-diffusion") / "text_encoder"
    shmload.view_directory(source, place, dtype="bfloat16")
    got = read(f"""
import transformers
model = transformers.CLIPTextModel.from_pretrained(sys.argv[1], {dtype})
summarise(model.state_dict())
""")
    model = transformers.CLIPTextModel.from_pretrained(source, dtype=torch.bfloat16)
    assert got == wanted(model.state_dict())
