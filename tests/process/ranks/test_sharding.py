"""torch's `fully_shard` over mapped weights, as the page about ranks has it, with two ranks."""

import json
import re
from pathlib import Path

import diffusers
import pytest
import torch
from pipelines import save_with_large_tensors

pytestmark = [pytest.mark.libraries, pytest.mark.slow]

_LAUNCHER = Path(__file__).parents[2] / "support" / "forking_launcher.py"
_PAGE = Path(__file__).parents[3] / "docs" / "ranks.md"
_SLACK_MB = 12  # interpreter, buffers, and padding of uneven slices

_BEFORE = """
import gc, json, re
import torch.distributed
def private_mb():
    gc.collect()
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
maps = open("/proc/self/maps").read().splitlines()
copies = sorted({line.split()[4] for line in maps if "/dev/shm/shmload-" in line})
torch.distributed.barrier()
before = private_mb()
"""
_AFTER = """
locals_ = [p.to_local() for p in transformer.parameters()]
part_mb = sum(p.numel() * p.element_size() for p in locals_) / 1e6
grown_mb = private_mb() - before
maps = open("/proc/self/maps").read()
mapped = "/dev/shm/shmload-" in maps
whole = {name: p.full_tensor() for name, p in transformer.named_parameters()}
if torch.distributed.get_rank() == 0:
    torch.save(whole, sys.argv[1] + "/whole.pt")
print(json.dumps([copies, part_mb, grown_mb, mapped]), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def shard(tmp_path, monkeypatch, warm_python, shm_names):
    """Run the page's program in two ranks; return what each says, and the gathered model."""

    def run(source, *changes):
        programs = re.findall(r"^```python\n(# torchrun .*?)^```", _PAGE.read_text(), re.M | re.S)
        (program,) = (each for each in programs if "fully_shard" in each)
        for old, new in [("path/to/flux", str(source)), *changes]:
            assert old in program
            program = program.replace(old, new)
        loading, sharding = program.split("for block in", 1)
        code = f"import sys\n{loading}{_BEFORE}for block in{sharding}{_AFTER}"
        (tmp_path / "program.py").write_text(code)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks need two devices, or the CPU
        options = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        ended = warm_python.run(_LAUNCHER, *options, tmp_path / "program.py", tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert shm_names() == []
        said = re.findall(r"\[\[.*?\], [^\]]*\]", ended.stdout)
        assert len(said) == 2, ended.stdout
        return [*map(json.loads, said)], torch.load(tmp_path / "whole.pt", weights_only=True)

    return run


def test_the_host_has_one_copy_and_a_rank_its_slices(shard, tmp_path):
    source = save_with_large_tensors(tmp_path / "large", 192)
    unet = diffusers.UNet2DModel.from_pretrained(source / "unet")
    names = ('["transformer"]', '["unet"]'), (").transformer", ").unet")
    said, gathered = shard(source, *names, ("transformer._no_split_modules", '["ResnetBlock2D"]'))
    assert gathered.keys() == dict(unet.named_parameters()).keys()
    for name, wanted in unet.named_parameters():
        assert torch.equal(gathered[name], wanted.bfloat16())
    whole_mb = sum(p.numel() for p in unet.parameters()) * 2 / 1e6
    assert said[0][0] == said[1][0] != []  # the same segment
    for _, part_mb, grown_mb, mapped in said:
        assert part_mb == pytest.approx(whole_mb / 2, rel=0.02)
        assert grown_mb < part_mb + _SLACK_MB < whole_mb - _SLACK_MB
        assert not mapped
