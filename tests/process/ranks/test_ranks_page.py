"""The sharding programs on the page about ranks run as printed."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries

_LAUNCHER = Path(__file__).parents[2] / "support" / "forking_launcher.py"
_PAGE = Path(__file__).parents[3] / "docs" / "ranks.md"
# The output of two ranks together, without line ends, which may come late.
_PRINTS = {"fsdp": "", "zero": "torch.Size([16, 32])" * 2}


@pytest.mark.slow
@pytest.mark.parametrize("module", _PRINTS)
def test_program_runs(saved, tmp_path, monkeypatch, warm_python, shm_names, module):
    programs = re.findall(r"^```python\n(# torchrun .*?)^```", _PAGE.read_text(), re.M | re.S)
    (program,) = [each for each in programs if f"import {module}\n" in each]
    assert "path/to/flux" in program
    path = tmp_path / "program.py"
    path.write_text(program.replace("path/to/flux", str(saved("flux"))))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks need two devices, or the CPU
    options = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = warm_python.run(_LAUNCHER, *options, path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.replace("\n", "") == _PRINTS[module]
    assert shm_names() == []
