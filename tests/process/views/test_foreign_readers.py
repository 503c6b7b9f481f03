"""Programs that know nothing of shmload read a view directory, and map its segments."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from children import run_to_end
from comparing import reference
from mappings import state_of
from safetensors.torch import save_file

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
    digests = {}
    for name, tensor in tensors.items():
        content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digests[name] = [True, str(tensor.dtype), _sha256(content)]
    return digests


def _sha256(content):
    import hashlib

    return hashlib.sha256(content).hexdigest()


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


def test_interpreter_without_shmload(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    # -S: the file that makes an editable install importable is not read.
    code = f"""
import sys
sys.path.append({sysconfig.get_path("purelib")!r})
import importlib.util
assert importlib.util.find_spec("shmload") is None
import glob, safetensors
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with safetensors.safe_open(path, "numpy") as file:
        print(*file.keys(), [file.get_slice(name).get_dtype() for name in file.keys()])
"""
    ended = run_to_end([sys.executable, "-I", "-S", "-c", code, place])
    assert ended.stdout.splitlines() == ["a.weight ['BF16']", "b ['I64']", "c ['BF16']"], (
        ended.stderr
    )


READER = """
import sys
import torch
from safetensors.torch import load_file
state = load_file(sys.argv[1])
with torch.device("meta" if sys.argv[2] == "keeps" else "cpu"):
    model = torch.nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16)
model.load_state_dict(state, assign=sys.argv[2] == "keeps")
del state
model(torch.ones(1, 1024, dtype=torch.bfloat16))
print("READY", flush=True)
sys.stdin.read()
"""
_PAGE = Path(__file__).parents[3] / "docs" / "unchanged.md"


@pytest.mark.parametrize("kind", ["keeps", "copies"])
def test_page_tells_whether_a_program_shares(tmp_path, place, child, kind):
    """The commands of the page, for a program that keeps mapped tensors and one that copies."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"weight": torch.ones(2048, 1024)}, source / "model.safetensors", {"format": "pt"})
    shmload.view_directory(source, place, dtype="bfloat16")
    process = child(READER, place / "model.safetensors", kind)
    process.expect("READY")
    (command,) = (line for line in _PAGE.read_text().splitlines() if line.startswith("awk "))
    said = _output_of(command, process)
    nbytes = int(said.partition(" kB of segments")[0]) << 10
    shown = _output_of(f"{sys.executable} -m shmload ls --json", process)
    users = {each["pid"] for model in json.loads(shown)["models"] for each in model["used_by"]}
    if kind == "keeps":
        assert nbytes >= 4 << 20
        assert users == {process.pid}
    else:
        assert nbytes == 0
        assert users == set()
    process.process.stdin.close()
    assert process.wait() == 0


def _output_of(command, process):
    """Run a line of the page for a process."""
    line = command.replace("PID", str(process.pid))
    ended = run_to_end(line, shell=True, check=True)
    return ended.stdout
